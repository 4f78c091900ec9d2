"""Programs and callbacks around training, each in a folder with its command; the core does not need them."""
