"""What makes a step's gradients: a file for each objective that has a loss of its own."""
