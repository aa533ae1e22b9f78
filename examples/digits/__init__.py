"""Handwritten digits: the data and the model of the examples that train."""
