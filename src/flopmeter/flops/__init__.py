"""How much work did this step need? Counting, estimating and predicting the FLOPs of a model."""
