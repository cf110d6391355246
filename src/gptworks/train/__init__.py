"""Training: the loop, the step, and what is recorded. Called, it trains a recipe: `gptworks.train("demo")`."""

from gptworks.packages import make_callable

make_callable(__name__, "gptworks.interface.training")
