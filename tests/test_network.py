"""Communication between ranks: planned bytes against real collectives, and the time that they take."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from gptworks.planning.arrange import rank_setting
from gptworks.planning.assumed import preset_recipe
from gptworks.planning.device_options import DeviceOptions
from gptworks.planning.device_table import find_device
from gptworks.planning.layout import Layout
from gptworks.planning.network import Collective, collectives, ring_bandwidth, sent_bytes
from gptworks.planning.run import Plan, plan
from gptworks.recipe import parse_recipe
from test_memory_of_ranks import GELU, LABORATORY, case
from test_parallel import ranks_of

H100 = find_device("h100")


def planned(name: str, ranks: int, *overrides: str, **node: Any) -> Plan:
    device = DeviceOptions(**node).in_node(H100, ranks)
    recipe, reason = preset_recipe(name, overrides, device, ranks)
    return plan(recipe, device=device, n_ranks=ranks, steps_reason=reason)


# bytes ------------------------------------------------------------------------------------------------------


CASES = {
    2: {
        "fsdp, bf16": case("fsdp", 2, 1, batch_size=16),
        "fsdp, fp32, checkpointed, untied": case("fsdp", 2, 1, "fp32", GELU, activation_checkpointing="block"),
        "fsdp, laboratory": case("fsdp", 2, 1, model=LABORATORY),
        "fsdp, an adapter": case("fsdp", 2, 1),
        "without resharding": case("zero2", 2, 1, batch_size=16),
        "ddp": case("none", 2, 1, batch_size=16),
        "ddp, muon": case("none", 2, 1, optimizer="muon"),
        "fsdp, muon": case("fsdp", 2, 1, optimizer="muon"),
        "tensor, muon": case("none", 1, 2, batch_size=8, optimizer="muon"),
        "ddp, soap": case("none", 2, 1, optimizer="soap"),
        "fsdp, soap": case("fsdp", 2, 1, optimizer="soap"),
        "tensor, soap": case("none", 1, 2, batch_size=8, optimizer="soap"),
        "tensor": case("none", 1, 2, batch_size=8),
        "tensor, checkpointed": case("none", 1, 2, "fp32", activation_checkpointing="selective"),
    },
    4: {
        "fsdp": case("fsdp", 4, 1),
        "ddp, muon": case("none", 4, 1, optimizer="muon"),
        "ddp × tensor": case("none", 2, 2),
        "ddp × tensor, muon": case("none", 2, 2, optimizer="muon"),
        "fsdp × tensor, muon": case("fsdp", 2, 2, optimizer="muon"),
        "ddp × tensor, soap": case("none", 2, 2, optimizer="soap"),
        "fsdp × tensor, soap": case("fsdp", 2, 2, optimizer="soap"),
        "fsdp × tensor": case("fsdp", 2, 2),
    },
}
CASES[2]["fsdp, an adapter"]["recipe"] |= {"adapter": {"rank": 8}, "initialize_from": "base"}


def planned_bytes(each: dict[str, Any]) -> Counter[str]:
    recipe, layout = parse_recipe(each["recipe"]), Layout(**each["layout"])
    setting = rank_setting(recipe, recipe.train.precision, on_cpu=True, layout=layout)
    micro_steps = recipe.train.batch_size // (layout.data_parallel * setting.micro_batch_size)
    found: Counter[str] = Counter()
    for one in collectives(setting):
        found[one.kind] += one.n_bytes * (micro_steps if one.in_each_micro_batch else 1)
    return found


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.ranks)])
def test_planned_bytes_are_those_of_real_collectives(n_ranks: int, tmp_path: Path) -> None:
    """Within 1%, because DDP also sends for each tensor whether it has a gradient."""
    cases = CASES[n_ranks]
    (tmp_path / "cases").write_text(json.dumps(list(cases.values())), encoding="utf-8")
    ranks_of(n_ranks, "traffic", tmp_path / "cases")
    measured = json.loads((tmp_path / "cases.results").read_text(encoding="utf-8"))
    for (name, each), sent in zip(cases.items(), measured, strict=True):
        expected = planned_bytes(each)
        print(f"{n_ranks} ranks, {name}: {sent} sent, {dict(expected)} planned")
        assert sent == pytest.approx({kind: n for kind, n in expected.items() if n}, rel=0.01), name


def test_a_plan_adds_up_what_several_collectives_send_of_one_kind_of_tensor() -> None:
    """Tensor-parallel ranks exchange parts of Muon's updates, data-parallel ranks copies of these parts."""
    found = planned(
        "gpt2", 4, "train.parallel.tensor_parallel=2", "train.parallel.strategy=ddp", "train.optimizer=muon",
        "model.dropout_attention=0",
    )  # fmt: skip
    several = [one for one in collectives(found.setting) if one.what == "updates"]
    assert {one.kind for one in several} == {"all_to_all", "broadcast"}
    sent = sum(sent_bytes(one, found.setting.layout, found.micro_steps) for one in several)
    assert found.sent_bytes["updates"] == sent


# time -------------------------------------------------------------------------------------------------------


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    def rate(n: int, tensor: int, dimension: str = "data", **node: Any) -> float:
        one = Collective("x", "all_gather", dimension, 1, "forward")
        return ring_bandwidth(one, Layout("fsdp", n, tensor), DeviceOptions(**node).in_node(H100, n * tensor)) / 1e9

    assert rate(8, 1) == 450  # in one node
    assert rate(16, 1) == 8 * 50  # eight cards, each for a ring of its own
    assert rate(16, 1, inter_node_gb_s=100) == 450
    assert rate(16, 1, gpus_per_node=1) == 50
    assert rate(16, 2) == 4 * 50  # four members of each group in a node, whose cards two groups share
    assert rate(16, 8) == 50
    assert rate(2, 8, "tensor") == 450
    assert rate(1, 16, "tensor") == 8 * 50
    one = Collective("x", "all_reduce", "data", 1000, "exposed")
    assert sent_bytes(one, Layout("none", 4), 3) == 3 * 2 * 1000 * 3 / 4
    assert sent_bytes(replace(one, kind="broadcast", in_each_micro_batch=False), Layout("none", 4), 3) == 750


def test_gpt3_on_1024_ranks_sends_what_its_layout_asks_for_and_waits_for_what_computing_does_not_hide() -> None:
    """FSDP sends 2 + 2 + 4 bytes per parameter, except for the embeddings, which are float32 and gathered once."""
    large = planned("gpt3-175b", 1024, "train.activation_checkpointing=selective")
    sent = sum(large.sent_bytes.values())
    assert sent == pytest.approx(8 * large.parameters.total * 1023 / 1024, rel=1e-3)
    assert sent == pytest.approx(1395e9, rel=1e-3)
    assert large.step_time is not None
    assert large.step_time.communication == pytest.approx(sent / 400e9, rel=1e-3)
    assert large.step_time.exposed < 0.01 * large.step_time.compute
    one_card = planned("gpt3-175b", 1024, "train.activation_checkpointing=selective", gpus_per_node=1)
    assert one_card.step_time is not None
    assert one_card.step_time.communication == pytest.approx(27.9, rel=0.002)
    times = one_card.step_time
    assert times.total == pytest.approx(times.communication, rel=0.01), "all computing is hidden behind it"
    assert one_card.tokens_per_second == pytest.approx(one_card.tokens_per_step / times.total)
    small = planned("gpt3-125m", 1024, "train.parallel.strategy=fsdp", gpus_per_node=1)
    assert small.step_time is not None
    assert small.step_time.communication == pytest.approx(0.0231, rel=0.01)  # 768 rows are padded to 1,024
    assert small.step_time.total > 3 * small.step_time.compute


def test_ddp_hides_its_sums_behind_the_last_backward_pass_and_tensor_parallelism_hides_nothing() -> None:
    ddp = planned("gpt3-350m", 16, "train.batch_size=256", "train.micro_batch_size=4", inter_node_gb_s=1)
    assert ddp.step_time is not None
    times, last_backward = ddp.step_time, ddp.step_time.compute * 2 / 3 / 4
    assert times.communication == pytest.approx(2 * 15 / 16 * 4 * ddp.parameters.total / 8e9)
    assert times.exposed == pytest.approx(times.communication - last_backward)
    fast = planned("gpt3-350m", 16, "train.batch_size=256", "train.micro_batch_size=4", inter_node_gb_s=1000)
    assert fast.step_time is not None and fast.step_time.exposed < 0.1 * fast.step_time.compute
    tensor = planned("gpt3-350m", 8, "train.parallel.tensor_parallel=8", "train.batch_size=8")
    assert tensor.step_time is not None
    assert tensor.step_time.exposed == pytest.approx(tensor.step_time.communication)
    stream = 2 * tensor.tokens_per_step * 1024
    assert tensor.sent_bytes["activations"] == pytest.approx(2 * 7 / 8 * 4 * 24 * stream)


def test_the_network_is_printed_and_can_be_set() -> None:
    arguments = ("plan", "gpt3-125m", "--device", "h100", "--world-size", "16")
    shown = tiny.gptworks(*arguments)
    for words in ("450 GB/s to the 8 of a node, 50 GB/s to others (DGX H100", "computing a step",
                  "communication of a step", "not hidden by computing", "each rank sends in a step"):  # fmt: skip
        assert words in " ".join(shown.stdout.split()), words
    given = ("--intra-node-gb-s", "30", "--inter-node-gb-s", "2", "--gpus-per-node", "4", "--host-memory-gib", "100")
    sheet = json.loads(tiny.gptworks(*arguments, *given, "--json").stdout)["network"]
    assert sheet["intra_node_bytes_per_second"] == 30e9 and sheet["inter_node_bytes_per_second"] == 2e9
    assert sheet["devices_per_node"] == 4 and sheet["source"] == "given"
    sent = sum(sheet["sent_bytes_per_step"].values())
    assert sheet["communication_seconds_per_step"] == pytest.approx(sent / 8e9)
    alone = json.loads(tiny.gptworks("plan", "gpt2", "--device", "h100", "--json").stdout)
    assert alone["network"] is None
    for option in ("--intra-node-gb-s", "--inter-node-gb-s", "--gpus-per-node", "--host-memory-gib"):
        refused = tiny.gptworks(*arguments, option, "0")
        assert refused.returncode == 2 and f"{option} 0 is not above 0" in refused.stderr


def test_ranks_of_one_processor_compute_no_faster_than_one() -> None:
    cpu = replace(H100, kind="cpu")
    recipe, _ = preset_recipe("gpt2", ["train.batch_size=8", "train.micro_batch_size=1", "train.max_steps=5"], cpu, 4)
    one, four, apart = (
        plan(recipe, device=DeviceOptions(gpus_per_node=nodes).in_node(cpu, n), n_ranks=n)
        for n, nodes in ((1, 1), (4, 4), (4, 1))
    )
    assert one.step_time and four.step_time and apart.step_time
    assert four.step_time.compute == pytest.approx(one.step_time.compute)
    assert apart.step_time.compute == pytest.approx(one.step_time.compute / 4)
