"""Look into a model on a text: what each token costs, where attention looks, what each layer would say and adds, where
the training data has the same words, and since which checkpoint the model knows them."""
