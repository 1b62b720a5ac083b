"""What DeepSpeed is told, as a pure dictionary. Each entry that looks odd has its reason beside it."""

from typing import Any, Literal

Precision = Literal["fp32", "bf16"]


def deepspeed_config(
    *, micro_batch: int, accumulation: int, dp: int, precision: Precision, clip_norm: float
) -> dict[str, Any]:
    """The configuration of one PipelineEngine. Batch sizes in sequences; clip_norm 0 is off."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro_batch * accumulation * dp,
        # Stage 1 even for one process: without ZeRO the fp32 norm of a pipeline comes out wrong.
        # Gradients are reduced by us: the buffer of 2 GB for its buckets would be for nothing.
        "zero_optimization": {"stage": 1, "contiguous_gradients": False},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        # bf16 would otherwise add up the micro-batches' gradients in bf16.
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": clip_norm,
        # Both default to true and then cut x over tp at a stage border as if it were replicated.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False},
        "steps_per_print": None,
        # The throughput timer synchronises the device at each micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }
