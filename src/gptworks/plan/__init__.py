"""What an architecture and a run cost, by arithmetic alone: nothing is allocated and torch is not imported."""

from gptworks.plan.flops import ForwardFlops, forward_flops
from gptworks.plan.params import ParameterCount, ParameterGroup, count_parameters
from gptworks.plan.run import Plan, plan

__all__ = [
    "ForwardFlops",
    "ParameterCount",
    "ParameterGroup",
    "Plan",
    "count_parameters",
    "forward_flops",
    "plan",
]
