"""Precision policies of frameworks, as options of a capture."""

import json

import pytest
import torch

from divergence.domains.training.policies import read_policy
from divergence.errors import UsageError


def deepspeed(tmp_path, **config):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    return read_policy(str(path))


def megatron(tmp_path, text):
    path = tmp_path / "pretrain.sh"
    path.write_text(text)
    return read_policy(str(path))


def dtypes(compute, reduce, accumulate, **more):
    """The options of a step in these."""
    return {"dtype": compute, "reduce_dtype": reduce, "accumulate_dtype": accumulate} | more


def stage(number, **config):
    return {"zero_optimization": {"stage": number}} | config


ON = {"enabled": True}
WIDE = dtypes("bfloat16", "float32", "float32", main_weights=True)
NARROW = {**WIDE, "reduce_dtype": "bfloat16", "accumulate_dtype": "bfloat16"}
BRAIN = dtypes("bfloat16", "bfloat16", "bfloat16", main_weights=True)
HALF = dtypes("float16", "float16", "float16", main_weights=True)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"train_batch_size": 8}, dtypes(*["float32"] * 3)),
        (stage(0, bf16=ON), {**BRAIN, "accumulate_dtype": "float32"}),
        (stage(3, bf16=ON), BRAIN),
        (
            stage(2, bfloat16=ON, communication_data_type="fp32", gradient_clipping=1.0)
            | {"data_types": {"grad_accum_dtype": "fp32"}},
            {**WIDE, "clip_grad_norm": 1.0},
        ),
        (
            stage(
                3, bf16=ON | {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
            ),
            {**BRAIN, "main_weights": False, "moments_dtype": "bfloat16"},
        ),
        ({"fp16": ON | {"loss_scale": 1024}}, {**HALF, "loss_scale": 1024.0}),
        ({"fp16": ON | {"loss_scale": 0, "initial_scale_power": 16}}, HALF),
        ({"train_batch_size": 8, "gradient_clipping": "auto"}, dtypes(*["float32"] * 3)),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            {"dtype": "float32", "autocast": "bfloat16", "accumulate_dtype": "float32"},
        ),
    ],
)
def test_deepspeeds_configuration(config, options, tmp_path):
    """Its keys become the options of a step."""
    policy = deepspeed(tmp_path, **config)
    assert policy.options == options
    assert str(policy).startswith("DeepSpeed: ")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bf16": {"enabled": "auto"}}, "leaves bf16.enabled open"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16"),
        ({"bf16": True}, "bf16 is no section"),
        ({"bf16": {"enabled": True}, "communication_data_type": "int8"}, "only float32, bfloat16"),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": "two"}}, "'two': no number"),
        ({"fp16": {"enabled": True, "loss_scale": True}}, "loss_scale is True"),
        ({"some": "thing"}, "no configuration of DeepSpeed"),
    ],
)
def test_a_configuration_that_decides_nothing_is_refused(config, words, tmp_path):
    """With what it lacks or contradicts."""
    with pytest.raises(UsageError, match=words):
        deepspeed(tmp_path, **config)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("torchrun pretrain_gpt.py --bf16 \\\n  --lr 1e-4\n", WIDE),
        ('ARGS="--bf16 --grad-reduce-in-bf16"', NARROW),
        ("--bf16\n--main-grads-dtype bf16", NARROW),
        (
            "--fp16 --loss-scale 4096 --clip-grad 1.0",
            {**HALF, "loss_scale": 4096.0, "clip_grad_norm": 1.0},
        ),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", {**WIDE, "dtype": "float16"}),
        (
            "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
            {**WIDE, "moments_dtype": "bfloat16"},
        ),
        (
            "[rank0]:  accumulate_allreduce_grads_in_fp32 .............. False\n"
            "[rank0]:  bf16 ............................................ True\n"
            "[rank0]:  fp16 ............................................ False\n"
            "[rank0]:  grad_reduce_in_bf16 ............................. True\n"
            "[rank0]:  loss_scale ...................................... None\n",
            NARROW,
        ),
        ("# --fp16 \\\n--bf16 \\\n  # --grad-reduce-in-bf16\n", WIDE),
        ("model:\n  bf16: true  # mixed precision\n  fp16: false\n", WIDE),
    ],
)
def test_megatrons_arguments(text, options, tmp_path):
    """Its arguments become the options of a step."""
    policy = megatron(tmp_path, text)
    assert policy.options == options
    assert str(policy).startswith("Megatron-LM: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--lr 1e-4", "neither DeepSpeed's configuration nor arguments"),
        ("--bf16 --loss-scale big", "'big': no number"),
        ("--bf16 --fp16", "both --bf16 and --fp16"),
        ("{broken", "it is no JSON"),
        ("--bf16 --use-precision-aware-optimizer --exp-avg-dtype fp8", "exp_avg_dtype"),
        ("--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16", "differ"),
        ("--bf16 --use-precision-aware-optimizer --main-params-dtype fp16", "in float32 alone"),
    ],
)
def test_arguments_that_cannot_be_tried_are_refused(text, words, tmp_path):
    """By the argument's name."""
    with pytest.raises(UsageError, match=words):
        megatron(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)", WIDE),
        ("MixedPrecisionPolicy(param_dtype=bf16)", {**NARROW, "accumulate_dtype": "float32"}),
        ("MixedPrecisionPolicy()", {"accumulate_dtype": "float32"}),
        (
            "torch.distributed.fsdp.MixedPrecision(param_dtype=torch.bfloat16, "
            "buffer_dtype=torch.bfloat16, cast_forward_inputs=True)",
            {**NARROW, "accumulate_dtype": "float32", "buffer_dtype": "bfloat16"},
        ),
    ],
)
def test_fsdps_policy(text, options):
    """Its text becomes the options of a step."""
    assert read_policy(text).options == options


def test_torchs_own_text_is_read():
    """As torch prints a policy."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert read_policy(repr(policy)).options == WIDE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("MixedPrecisionPolicy(torch.bfloat16)", "name each argument"),
        ("MixedPrecisionPolicy(dtype=torch.bfloat16)", "has no dtype"),
        ("MixedPrecisionPolicy(param_dtype=", "--precision-policy"),
        ("ds_config.json", "No such file"),
    ],
)
def test_a_policy_that_is_none_is_refused(text, words):
    """With what is wrong about it."""
    with pytest.raises(UsageError, match=words):
        read_policy(text)
