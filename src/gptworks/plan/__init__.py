"""What an architecture and a run cost, by arithmetic alone: nothing is allocated and torch is not imported."""

from gptworks.describe.sheet import Sheet, describe
from gptworks.plan.flops import ForwardFlops, forward_flops
from gptworks.plan.params import ParameterCount, ParameterGroup, count_parameters
from gptworks.plan.run import Plan, plan

__all__ = [
    "ForwardFlops",
    "ParameterCount",
    "ParameterGroup",
    "Plan",
    "Sheet",
    "count_parameters",
    "describe",
    "forward_flops",
    "plan",
]
