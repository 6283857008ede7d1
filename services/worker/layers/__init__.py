"""What the model families are made of."""
