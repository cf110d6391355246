"""Figures as JSON that several sheets share."""

from typing import Any

from gptworks.plan.params import ParameterCount


def parameters_json(parameters: ParameterCount) -> dict[str, Any]:
    return {
        "total": parameters.total,
        "active": parameters.active,
        "embedding": parameters.embedding,
        "non_embedding": parameters.non_embedding,
        "groups": {
            group.name: {
                "per_layer": group.per_layer if group.in_block else None,
                "total": group.total,
                "tensors": {name: list(shape) for name, shape in group.tensors.items()},
            }
            for group in parameters.groups.values()
        },
    }
