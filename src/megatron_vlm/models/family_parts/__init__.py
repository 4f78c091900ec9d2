"""Parts of several families: the reading of config.json, text models, towers, rules for weights."""
