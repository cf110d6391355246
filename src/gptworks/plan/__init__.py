"""What an architecture and a run cost, by arithmetic alone: nothing is allocated and torch is not imported.

Called, it plans a recipe: `gptworks.plan("demo")`.
"""

from gptworks.packages import make_callable

make_callable(__name__, "gptworks.interface.planning")
