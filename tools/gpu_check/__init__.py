"""What a machine with a GPU shows in its first half hour; see `__main__`."""
