"""What the names of layers say."""

import pytest

from fusion_bench_nufilt.methods.base import block_of
from fusion_bench_nufilt.models.layers import in_module_of_block, without_numbers

BLOCKS = {
    "model.layers.3.mlp.up_proj": ("model.layers.", 3, "mlp.up_proj"),
    "layers.0.experts.12.w": ("layers.", 0, "experts.12.w"),
    "0.weight": (None, 0, "weight"),
    "blocks.7": None,
    "head.weight": None,
    "conv2.weight": None,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_block_of_a_layer_is_the_outermost_numbered_one(name):
    assert block_of(name) == BLOCKS[name]


def test_a_blocks_own_parameter_belongs_to_no_module_of_it():
    assert in_module_of_block("layers.0.mlp.weight")
    assert not in_module_of_block("layers.0.gamma")


def test_the_same_layers_of_all_blocks_have_one_name():
    assert without_numbers("0.layers.1.experts.22.w1.weight") == "*.layers.*.experts.*.w1.weight"
    assert without_numbers("layers.1") == "layers.1"
