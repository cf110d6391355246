"""Show how a model reads a text: the loss of each token, attention maps, each layer's prediction and contribution,
n-grams of the training data, and when a run learned each token. Also compute statistics of a checkpoint's weights."""
