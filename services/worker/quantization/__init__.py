"""Weights in fewer bits than they are computed in; the file name is the method's name."""
