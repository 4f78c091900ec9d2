"""What several families are made of: the reading of config.json, text models, towers, rules for weights."""
