"""Show how a model reads a text: the loss of each token, attention maps, each layer's prediction and contribution,
n-grams of the training data, and the loss at each checkpoint. Also compute statistics of a checkpoint's weights."""
