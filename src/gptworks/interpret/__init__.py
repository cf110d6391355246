"""Show how a model reads a text: the loss of each token, attention maps, what each layer predicts and adds, n-grams of
the training data, and the loss at each checkpoint. Also compute statistics of a checkpoint's weights."""
