"""Evaluation: how well a model predicts held-out text. Called, it measures a run: `gptworks.evaluate("runs/demo")`."""

from gptworks.packages import make_callable

make_callable(__name__, "gptworks.interface.measuring")
