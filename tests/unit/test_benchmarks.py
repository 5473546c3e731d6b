"""The benchmarks: summaries follow from rows, rows from what was measured, and the documents say
what they say.
"""

import importlib
import json
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.core.probe_types import DryCount
from autotune.planning.device_estimate import (
    ACCURACY,
    COUNTED,
    COUNTED_RANKS,
    OF_OBJECTIVES,
    RANK_ACCURACY,
)
from autotune.prediction.depth_extrapolation import count_at_depth
from autotune.prediction.sharded_memory import COUNTED_RANK_ERROR
from autotune.prediction.transfer import OF_MEMORY
from tests.system.faults.conftest import table

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((BENCHMARKS / "results").glob("*.json"))
}
# What a summary holds that no row tells.
PLANTED = {"old", "new", "planted", "seconds"}
BESIDE_ROWS = {
    "gpu_gate": PLANTED,
    "gpu_gate_memory": PLANTED,
    "gpu_gate_slowdown": PLANTED,
    "cap": {"cap_gib"},
    "cap22": {"study_tokens_per_s"},
    "chat_training": {"rows", "held_out"},
    "disturbed": {"trials_lost"},
    "dry_probe": {"plan_seconds_unknown", "plan_seconds"},
    "mutation": {"seed", "minutes"},
    "estimators": {"versions"},
    "fuzz": {"seed"},
    "lost_text": {"seed"},
    "projection": {"exponents_of_all_sets", "share_of_all_sets"},
    "report": {"trials"},
    "search_efficiency": {
        "configs",
        "configs_within_goal",
        "best",
        "best_tokens_per_second",
        "censored_at_s",
        "live",
    }
    | {"cold_charge_over_measured"},
    "study_7b": {
        "wall_seconds",
        "configs_judged",
        "full_depth_ooms",
        "speedup",
        "trials",
        "seconds_beside_probes",
    }
    | {"tokens_per_second", "exported"},
    "warm_vs_cold": {"wall_ratio_with_the_first_start", "workers_replaced"},
}
# What `docs/evidence.md` says of a result.
SAID = [
    (
        "verify",
        "the exported run of {winners} winners | speed {tokens_error_median:.1%} median,"
        " {tokens_error_max:.0%}",
    ),
    (
        "verify",
        "({winners_within_3_percent} of {winners} within 3%); memory {peak_error_max:.2%} worst",
    ),
    ("verify", "**{peak_error_max:.2%} worst**: error of the promised reserved memory"),
    (
        "verify",
        "**{tokens_error_median:.1%} median, {tokens_error_max:.0%} worst**: error of the promised"
        " speed",
    ),
    ("verify", "| speed of an exported run | {tokens_error_max:.0%} off |"),
    (
        "depth_extrapolation",
        "memory {reserved_error_median:.2%} median, {reserved_error_max:.1%} worst; time",
    ),
    (
        "depth_extrapolation",
        "time {time_error_median:.1%} median and {time_error_max:.1%} worst undisturbed,",
    ),
    ("depth_extrapolation", "undisturbed, {first_error_max_of_all:.0%} worst in a study"),
    (
        "depth_extrapolation",
        "**{reserved_error_median:.2%} median, {reserved_error_max:.1%} worst**: error of the"
        " reserved"
        " memory of whole",
    ),
    ("depth_extrapolation", "measured for {configs} configurations of five model families"),
    ("depth_extrapolation", "Peak allocated memory is {peak_error_max:.1%} off at worst"),
    ("depth_extrapolation", "| step time, GPU-bound | 0.6% | {time_error_max_device_bound:.1%} |"),
    ("depth_extrapolation", "| step time, CPU-bound | 0.6% | {time_error_max_host_bound:.1%} |"),
    (
        "depth_extrapolation",
        "**{first_error_median:.1%} median, {first_error_max:.0%} worst**: error for the same",
    ),
    (
        "depth_extrapolation",
        "**{whole_differs_max_host_bound_of_all:.0%} worst**: difference of two probes",
    ),
    (
        "depth_extrapolation",
        "Otherwise they differ by up to {whole_differs_max_device_bound_of_all:.0%} (",
    ),
    (
        "depth_extrapolation",
        "| extrapolated step time | {first_error_max_of_all:.0%} off, interval 15%",
    ),
    (
        "depth_extrapolation",
        "| two probes of the same work | differ by {whole_differs_max_host_bound_of_all:.0%} |",
    ),
    (
        "oom_gate",
        "**{false_refusals} false refusals**: of {configs} configurations under three memory"
        " limits",
    ),
    ("oom_gate", "All {do_not_fit} that do not fit were stopped"),
    ("cap", "**{disagreements} wrong verdicts**: an H200 emulated an A10"),
    (
        "cap",
        "Of {configs} configurations that need about the memory of an A10, {verdicts} need over 2%",
    ),
    ("cap", "For {published} configurations others published a verdict, and all {published} agree"),
    (
        "warm_vs_cold",
        "**{peak_error_max:.0f} difference**: {configs} configurations had exactly the same peak",
    ),
    ("warm_vs_cold", "for {configs} configurations. The warm worker saves"),
    (
        "plan_memory",
        "| {heldout_configs} configurations of {heldout_models} models outside the fit |",
    ),
    (
        "plan_memory",
        "memory {heldout_error_max:.1%} worst; step time {heldout_pace_error_median:.0%} median, on"
        " average",
    ),
    ("plan_memory", "on average {heldout_pace_bias:.0%} too long |"),
    (
        "plan_memory",
        "**{heldout_error_max:.1%} worst, {heldout_error_median:.2%} median**: error of the"
        " predicted allocated memory of {heldout_configs}",
    ),
    ("plan_memory", "Reserved memory is {heldout_reserved_error_max:.1%} off at worst"),
    (
        "plan_memory",
        "**{error_max:.1%} worst**: error of the predicted allocated memory of {fitted_configs}"
        " configurations of"
        " the {fitted_models} models",
    ),
    (
        "plan_memory",
        "({configs_of_the_most_frequent_model} of the configurations are of Mistral-7B)",
    ),
    (
        "plan_memory",
        "**{heldout_counted_error_max:.2%} worst**: difference between the counted and the"
        " measured memory of the {heldout_configs} held-out configurations",
    ),
    (
        "plan_memory",
        "**{heldout_pace_error_median:.1%} median, {heldout_pace_bias:.0%} too long on average**:"
        " error of the predicted step time",
    ),
    (
        "plan_memory",
        "should hold 80% of the step times, and held {heldout_pace_within_80:.0%} of them. For the",
    ),
    ("plan_memory", "are CPU-bound, the median is {pace_error_median:.1%}"),
    (
        "plan_memory",
        "**{pace_error_max:.0%} worst**: error of the predicted step time of a CPU-bound"
        " configuration",
    ),
    (
        "plan_memory",
        "| memory by formula, new models | {heldout_error_max:.1%} off | the worst of"
        " {heldout_configs}",
    ),
    (
        "plan_published",
        "**{memory_error_median:.1%} median, {memory_error_max:.0%} worst**: error of the"
        " predicted memory, compared with {memory_rows} peaks that others published",
    ),
    ("plan_published", "Of {rows} published runs, {excluded} cannot be expressed"),
    ("plan_published", "{memory_within_15} of the {memory_rows} peaks are within 15%"),
    ("plan_published", "for {unexplained} of the others, no cause is known"),
    (
        "plan_published",
        "Of {verdicts} verdicts, {verdicts_wrong} are wrong",
    ),
    (
        "plan_published",
        "are torchtune {by_source[torchtune]:.1%}, fms-acceleration {by_source[fms]:.1%}, litgpt "
        "{by_source[litgpt]:.1%}",
    ),
    (
        "plan_published",
        "LLaMA-Factory {by_source[llamafactory]:.0%}, Qwen {by_source[qwen]:.0%}, Axolotl"
        " {by_source[axolotl]:.0%}, torchao {by_source[pytorch/ao]:.1%}, fitcheck"
        " {by_source[fitcheck]:.1%}, universal-llm-trainer {by_source[a100]:.0%} and ms-swift"
        " {by_source[ms-swift]:.0%}",
    ),
    (
        "plan_published",
        "**{gpu_bound_inside} of {gpu_bound_speeds} inside**: the speeds of GPU-bound steps",
    ),
    (
        "plan_published",
        "The interval is {gpu_bound_half_width_median:.0%} wide to each side in the median, and"
        " wider than 30% for {wider_than_30} of them",
    ),
    ("allocator", "to {error_max:.0%} too high**: the predicted reserved memory of nine"),
    (
        "allocator",
        "configurations is 2.7% too low to {counted_error_max:.1%} too high. For"
        " {published_configs} whole models on a T4, whose reserved memory others published, it is"
        " {published_error_median:.1%} off in the median and {published_error_max:.0%} at worst",
    ),
    ("allocator", "reserve up to {unused_max_fixed:.0%} more memory than is allocated"),
    ("allocator", "growing segments reserve up to {unused_max_expandable:.0%} more"),
    (
        "dry_probe",
        "**{error_median:.2%} median, {error_max:.1%} worst**: difference between counted and"
        " measured peaks of {configs} real probes on an H100",
    ),
    ("dry_probe", "of small models from {families} families"),
    ("dry_probe", "Compiled layers are {error_max_compiled:.2%} off at worst"),
    ("dry_probe", "{heldout_families} families were in no earlier comparison"),
    (
        "day_zero_gpu",
        "the counted peaks of {configs} whole models from {families} families of 2025 and 2026",
    ),
    ("two_gpus", "**{scaling:.2f} times**: speed of the winner of a cold study on two H200s"),
    ("two_gpus", "all layers: {two_tokens_per_s:,.0f} and {one_tokens_per_s:,.0f} tokens/s"),
    ("two_gpus", "The first compiled candidate on two GPUs ended after {first_compiled_s:.0f} s"),
    ("two_gpus", "master weights reached {full8b_tokens_per_s:,.0f} tokens/s on two GPUs"),
    ("offload", "**{memory_error_max:.0e} worst**: relative difference between the peak memory"),
    ("offload", "The formula of plans is {formula_error_max:.1%} off at worst"),
    ("fp8_lora", "**{lora_tokens_per_s:,.0f} tokens/s**: Llama-2-7B on an H200 with LoRA of rank"),
    (
        "sharded_nf4_70b",
        "**{qlora70_gib:.1f} GiB**: largest reserved memory of Llama 3.1 70B with QLoRA",
    ),
    ("sharded_nf4_70b", "predicted the peaks, and was {formula_error_max:.2%} off at worst"),
    (
        "sharded_nf4_70b",
        "12 layers predicted the peak, with a relative error of at most {qlora70_error:.0e}",
    ),
    ("sharded_nf4_70b", "for 512 tokens, and {gpus_without_offload} for 2,048"),
    ("fp8_lora", "A base in bf16 reaches {bf16_tokens_per_s:,.0f} tokens/s"),
    ("fp8_lora", "the same base, and {lora_over_earlier:.2f} times as fast as those"),
    ("fp8_lora", "Joined adapters are {lora_over_before:.2f} times as fast as PEFT's own"),
    ("fp8_lora", "| joined adapters on an fp8 base | {lora_over_before:.2f} times; goal 1.10"),
    ("fp8_full", "**{full_over_bf16:.2f} times**: speed of full fine-tuning of Llama 3.1 8B"),
    (
        "fp8_full",
        "Each GPU reaches {full_tokens_per_s:,.0f} tokens/s with one scale for each tensor",
    ),
    (
        "fp8_full",
        "each tensor, {rowwise_tokens_per_s:,.0f} tokens/s ({rowwise_over_bf16:.2f} times) with one"
        " scale for each row, and {bf16_tokens_per_s:,.0f} tokens/s in bf16",
    ),
    (
        "fp8_losses",
        "**{tensorwise_difference:+.2%} and {rowwise_difference:+.2%}**: mean difference of the"
        " final held-out loss of full fine-tuning",
    ),
    (
        "fp8_losses",
        "The uncertainties are {tensorwise_error:.2%} and {rowwise_error:.2%}. A small Llama",
    ),
    ("fp8_losses", "and the sixth is +{tensorwise_largest:.2%}. With scales"),
    (
        "sharded_nf4_learning",
        "**{adapter_difference:.3%}**: difference between the changes of adapters that two H200s",
    ),
    ("sharded_nf4_learning", "Over {steps} steps in fp32, the loss falls by {fell:.1f}"),
    (
        "sharded_nf4_learning",
        "at most {difference:.0e}. Each GPU holds {packed_share:.0%} of the packed",
    ),
    ("mixtures", "**{gptoss_over_before:.2f} times**: gpt-oss-20b with adapters on its experts"),
    ("mixtures", "{qwen_tokens_per_s:,.0f} tokens/s at best"),
    ("mixtures", "in 4 bits, it reaches {qwen_nf4_tokens_per_s:,.0f} tokens/s"),
    ("mixtures", "**{found_share:.0%}**: speed of the winner of a study of 150 s"),
    ("mixtures", "**{triton_over_fused:.2f} times**: speed of a whole step with our"),
    ("mixtures", "**{memory_error_max:.1%} worst**: difference between the counted and the"),
    ("mixtures", "reserves {qwen_attention_gib:.1f} GiB for sequences of 4,096 tokens"),
    ("mixtures", "on attention, and {qwen_experts_gib:.1f} GiB for 1,024"),
    ("mixtures", "gpt-oss-20b reserves {gptoss_gib:.1f} GiB for 1,024 tokens"),
    ("mixtures_beside", "**{ratio:.2f} times**: our best tokens/s, divided by unsloth's best"),
    ("mixtures_beside", "unsloth reaches {theirs_tokens_per_s:,.0f} tokens/s"),
    ("mixtures_beside", "Axolotl {by_project[axolotl]:,.0f} tokens/s"),
    ("mixtures_quality", "**{split_difference_mean:.3%} and {nf4_difference_mean:.3%}**"),
    ("day_zero_gpu", "**{memory_error_max:.4%} worst**: difference between the counted peaks"),
    ("day_zero", "**{answered} of {types}**: causal and image-text-to-text model types"),
    ("day_zero", "The other {refused} types are refused with a reason"),
    ("day_zero", "all {named_answered} types of 2025 and 2026 that we had listed"),
    (
        "day_zero_gpu",
        "in {gpu_bound} of the {configs}; the step times of these {gpu_bound} are"
        " {time_error_median:.1%} off",
    ),
    ("day_zero_gpu", "in the median and {time_error_max:.1%} at worst. One of the {configs} step"),
    (
        "ranks_end_gpus",
        "**{hangs} hangs and {orphans} orphans**: {runs} exported runs on two H200s",
    ),
    ("ranks_end_gpus", "The last process ended after {end_s_max:.1f} s at most"),
    ("dry_probe", "**{plan_seconds_unknown:.1f} s**: the first plan of an unknown model"),
    ("dry_probe", "The second plan took {plan_seconds:.1f} s"),
    ("world", "for {configs} configurations. One GPU simulates a rank"),
    (
        "world",
        "**{step_ratio_median:.2f} times in the median, {step_ratio_max:.1f} times at worst**: a"
        " real step",
    ),
    (
        "world_depth",
        "on two H200s. Reserved memory is at most 2.3% off, but {reserved_error_max:.0%} under the"
        " third stage",
    ),
    (
        "world_depth",
        "**{time_error_max:.1%} worst**: error of the step time of GPU-bound whole models",
    ),
    (
        "world_depth",
        "catalogue's link speed needs only one card. It is {unseen_time_error_max:.1%} off at"
        " worst",
    ),
    (
        "world_depth",
        "predictions from real ranks are {host_bound_time_error_max:.0%} off, and predictions"
        " from a simulated rank {host_bound_unseen_time_error_max:.0%}",
    ),
    ("world_four", "**{time_error_max:.1%} worst**: error of the step time on four H200s"),
    ("world_four", "On four H200s the longest time was {stopped_s_max:.1f} s"),
    ("world_oom", "**{stopped_s_max:.2f} s**: longest time until all ranks stopped"),
    (
        "world_losses",
        "**{ddp_loss_error_max:.3%} under DDP, {fsdp2_loss_error_max:.2%} under FSDP2**: difference"
        " between the losses of two H100s",
    ),
    (
        "counted_ranks",
        "**{error_median:.1%} median, {error_max:.1%} worst**: error of the formula for"
        " {ranks} ranks",
    ),
    ("counted_ranks", "ranks of {models} models under FSDP2, whose memory was counted"),
    (
        "mixture_ranks",
        "**{error_max:.1%} worst, below 0.1% in the median**: error of the memory that plans give"
        " for {ranks} ranks of {models} mixtures",
    ),
    ("counted_ranks", "models outside the fit are {other_models_error_max:.1%} off at worst"),
    (
        "plan_world",
        "**{own_memory_error_max:.1%} worst**: error of the formula for the peak memory of our"
        " own ranks",
    ),
    (
        "plan_world",
        "the {memory_rows} rows are {memory_error_median:.0%} off in the median and"
        " {memory_error_max:.0%} at worst",
    ),
    ("plan_world", "Of {rows} trainings in this file, {excluded} cannot be expressed"),
    (
        "plan_world",
        "**{inside_share:.0%} inside**: share of {timed} speeds inside the formula's interval",
    ),
    (
        "packing",
        "**{error_max:.1%} worst**: error of the promised speed of one exported script on"
        " examples of"
        " very different lengths",
    ),
    (
        "real_data",
        "**{error_max:.1%} worst**: error of the projected time of a pass over 3,000 examples",
    ),
    (
        "real_data",
        "| padded to the longest | 152 s | 163 s | -{error_max:.1%} | {speedup_padded:.2f} |",
    ),
    (
        "real_data",
        "| padded to one of four lengths, compiled | 104 s | 108 s | -3.5% | {speedup_bucketed:.2f}"
        " |",
    ),
    ("real_data", "| packed, compiled | 52.1 s | 52.1 s | 0.04% | {speedup_packed:.2f} |"),
    ("real_data", "**{trl_error:.1%}**: `trl sft` reached 3,613 tokens/s"),
    ("real_data", "**{speedup_packed:.2f} times**: speed-up of a pass over examples"),
    (
        "cpu_truth",
        "**{ratio_min:.2f}, {ratio:.2f} and {ratio_max:.2f} times**: promised speed divided"
        " by reached speed",
    ),
    (
        "projection",
        "{pairs} published pairs of cards in {sets} sets | {error_mean_of_unseen_sets:.0%} mean,",
    ),
    (
        "projection",
        "mean, {error_mean_of_sets_uncalibrated:.0%} if each set counts once; with one measurement"
        " on",
    ),
    (
        "projection",
        "target card {error_mean_calibrated:.0%} and {error_mean_of_sets_calibrated:.0%} |",
    ),
    (
        "projection",
        "**{error_mean_of_unseen_sets:.0%} mean, {error_mean_of_sets_of_unseen_sets:.0%} if each"
        " set counts once**: error of the projected speed for {pairs}",
    ),
    (
        "projection",
        "bandwidth is {error_mean_by_geometric_mean:.0%} off, and the ratio of peak rates"
        " alone is {error_mean_by_flops:.0%} off",
    ),
    ("projection", "**{coverage_80:.0%} inside**: share of the pairs inside the printed interval"),
    (
        "projection",
        "The share is {coverage_80_of_sets:.0%} if each set counts once. It is"
        " {coverage_80_of_unseen_sets:.0%} if the set",
    ),
    (
        "projection",
        "**{error_mean_calibrated:.0%} mean, {error_mean_of_sets_calibrated:.0%} if each set counts"
        " once**: error for the same",
    ),
    (
        "projection",
        "| {error_max_uncalibrated:.0%} off at worst, {error_mean_of_sets_uncalibrated:.0%} mean"
        " over sets |",
    ),
    (
        "transfer",
        "**{error_median:.1%} median, {error_max:.0%} worst**: error of the predicted step time for"
        " GPU-bound pairs of an H100 and an H200",
    ),
    (
        "transfer",
        "{configs} configurations of three models were probed on both cards; the {pairs} pairs",
    ),
    (
        "transfer",
        "| GPU-bound on both cards | {device_bound} | {old_error_median:.1%}, {old_error_max:.0%}"
        " | "
        "{error_median:.1%}, {error_max:.0%} |",
    ),
    (
        "transfer",
        "| GPU-bound on both cards, and the host needs less than a tenth of the time |"
        " {device_alone} |"
        " {old_device_alone_error_median:.1%}, "
        "{old_device_alone_error_max:.0%} | {device_alone_error_median:.1%},"
        " {device_alone_error_max:.1%} |",
    ),
    (
        "transfer",
        "| CPU-bound on one card or both | {host_bound} | {old_host_bound_error_median:.0%}, "
        "{old_host_bound_error_max:.0%} | {host_bound_error_median:.0%}, {host_bound_error_max:.0%}"
        " |",
    ),
    (
        "transfer",
        "**{inside_80:.0%} inside**: share of the {pairs} pairs inside the interval, which"
        " should hold 80% of them. With the narrower interval of calibrated hosts the share is"
        " {calibrated_inside_80:.0%} (",
    ),
    (
        "transfer",
        "| {host_bound_error_median:.0%} median, {host_bound_error_max:.0%} worst | the other"
        " host has another speed; "
        "{calibrated_error_median:.0%} and {calibrated_error_max:.0%} after",
    ),
    ("transfer", "| the same host at two times | {host_drift_max:.0%} apart |"),
    ("transfer", "| two hosts with the same work | {hosts_differ_max:.1f} times apart |"),
    (
        "plan_speed",
        "**{heldout_error_median:.1%} median, {heldout_error_max:.0%} worst**: error of the"
        " predicted step time of {heldout_configs} GPU-bound micro batches of {heldout_models}"
        " models",
    ),
    (
        "plan_speed",
        "was {heldout_first_error_median:.1%} off in the median and"
        " {heldout_first_error_max:.0%} at worst",
    ),
    (
        "plan_speed",
        "{whole_configs} whole models and configurations of {whole_models} models are"
        " {whole_error_median:.1%} off in the median; the earlier formula was"
        " {whole_first_error_median:.1%} off",
    ),
    (
        "plan_speed",
        "**{error_median:.0%} median**: error of the formula for speeds on A100s that others"
        " published. Of {rows} speeds,"
        " {excluded} cannot",
    ),
    (
        "plan_speed",
        "at most {device_bound_half_width_max:.0%} wide on either side, holds"
        " {device_bound_inside:.0%} of "
        "the GPU-bound",
    ),
    (
        "plan_speed",
        "The {host_bound} speeds with a host's share of at least 0.1 are within a factor of 2",
    ),
    (
        "counted_speed",
        "**{device_bound_counted_error_median:.1%} median, {device_bound_counted_error_max:.1%}"
        " worst**: error of the step time that was predicted from counted work, for"
        " {device_bound_configs} GPU-bound configurations of {models} dense models",
    ),
    (
        "counted_speed",
        "the formula is {device_bound_formula_error_median:.1%} off in the median, and"
        " {device_bound_formula_error_max:.0%} at worst",
    ),
    (
        "counted_speed",
        "**{host_bound_counted_error_median:.0%} median, {host_bound_counted_error_max:.0%}"
        " worst**: error of the step times from counted work for {host_bound_configs} CPU-bound",
    ),
    (
        "counted_speed",
        "formula is {host_bound_formula_error_median:.0%} off in the median for them, and"
        " {host_bound_formula_error_max:.0%} at worst",
    ),
    (
        "counted_speed",
        "**{unknown_first_error_median:.0%} median, {unknown_first_error_max:.0%} worst**:"
        " error of the first prediction for {unknown_models} models without a formula on an"
        " H100, in"
        " {unknown_configs} configurations",
    ),
    ("counted_speed", "held {unknown_first_inside_80:.0%} of them"),
    (
        "counted_speed",
        "**{unknown_counted_error_median:.1%} median, {unknown_counted_error_max:.0%}"
        " worst**: error for the same {unknown_configs} configurations now",
    ),
    (
        "counted_speed",
        "time is {unknown_device_error_median:.1%} off in the median and"
        " {unknown_device_error_max:.1%} at worst",
    ),
    ("counted_speed", "peaks are {unknown_peak_error_max:.2%} off at most"),
    ("objectives", "{time_error_max:.1%} for time**: errors for three models with images"),
    (
        "objectives",
        "The {host_bound} CPU-bound ones (DPO and KTO) are {host_bound_time_error_max:.1%} off at"
        " most",
    ),
    (
        "exported_objectives",
        "**{speed_error_max:.1%} worst for speed, {memory_error_max:.1%} for memory**: errors of"
        " the promised values",
    ),
    (
        "plan_objectives",
        "**{error_max:.1%} worst for memory, {time_error_median:.0%} median for time**: errors of"
        " the formulas for {configs}",
    ),
    ("plan_objectives", "step is {counted_error_max:.2%} off at worst"),
    (
        "plan_objectives",
        "Step times are {time_error_max:.0%} off at worst, and {time_inside} of {configs} lie",
    ),
    (
        "plan_objectives",
        "would be {as_sft_error_median:.0%} too high in the median and {as_sft_error_max:.0%} at"
        " worst",
    ),
    (
        "plan_objectives",
        "Of {sft_configs} step times for next-token prediction, only {sft_time_inside} lie",
    ),
    (
        "search_efficiency",
        "**{ours_seconds:.0f} s**: GPU time until a search comes within 2% of the best of {configs}"
        " measured",
    ),
    (
        "search_efficiency",
        "| {ours_seconds:.0f} s ({ours_climbing_seconds:.0f} s without the formulas",
    ),
    ("search_efficiency", "| {optuna_cold_seconds:.0f} s, median of {seeds} seeds |"),
    (
        "search_efficiency",
        "| {optuna_warm_seconds:.0f} s, median of {seeds} seeds (half of them between",
    ),
    ("search_efficiency", "| {random_seconds:,.0f} s, median of {seeds} seeds |"),
    (
        "search_efficiency",
        "**{ratio_to_optuna:.1f} times**: GPU time of Optuna, divided by the GPU time of autotune",
    ),
    (
        "search_efficiency",
        "the search itself is {ratio_to_warm_tpe:.1f} times as quick"
        " ({ratio_to_warm_tpe_climbing:.1f} times without",
    ),
    (
        "cold_study",
        "**{h100_seconds_to_2_percent:.0f} s and {h200_seconds_to_2_percent:.0f} s**: time until a"
        " cold study",
    ),
    ("cold_study", "came within 5% after {large_seconds_to_5_percent:.0f} s"),
    ("cold_study", "**34 and {judged_in_120_s} configurations**: judged in 120 s"),
    ("cold_study", "compiled for 12 and {compile_wait_share:.0%} of its probe time"),
    (
        "cold_study",
        "judged {judged_in_120_s_without} and 31 configurations, and compiled for up to"
        " {compile_wait_share_without:.0%} of the probe time",
    ),
    (
        "cold_study",
        "differ by up to {probe_change_max:.0%} from probes that run alone. Two probes that"
        " both run alone also differ by up to {alone_change_max:.0%}",
    ),
    ("study_7b", "**{configs_judged} configurations in {wall_seconds:.0f} s**: a study of a 7B"),
    ("study_7b", "**{speedup:.1f} times**: tokens/s of a 7B's winner"),
    ("long_tails", "**{large_judged} and {small_judged} configurations**: judged on rows"),
    ("long_tails", "its winner reached {large_mfu:.0%} MFU"),
    ("first_minutes", "**{first_number_s:.0f} s and {answer_s:.0f} s**: README's first command"),
    ("first_minutes", "took {h100_first_number_s:.0f} s and {h100_answer_s:.0f} s ("),
    ("light_install", "**{light_install_s:.1f} s and {plan_answer_s:.1f} s**: a light install"),
    ("light_install", "the install takes {light_mb:.1f} MB"),
    ("light_install", "With the extra `data`, it takes {data_mb:.1f} MB"),
    (
        "side_by_side",
        "**{ratios[h100-sxm 1]:.2f} and {ratios[h200-sxm]:.2f} times**: autotune's speed relative",
    ),
    (
        "side_by_side",
        "The exported run had {study_tokens_per_s:,.0f} tokens/s, {study_ratio:.2f} times"
        " torchtune's",
    ),
    ("side_by_side", "| winner of a two-minute study | {study_ratio:.2f} times torchtune |"),
    (
        "cap22",
        "**{ratio:.2f} times**: speed of a study's winner, divided by the speed of the"
        " published advice for"
        " 24 GB cards: "
        "{winner_tokens_per_s:,.0f} and {advice_tokens_per_s:,.0f} tokens/s",
    ),
    ("longest", "**{tokens_80gb:,} tokens in {step_s_80gb:.0f} s**: the longest row"),
    ("longest", "the longest is {tokens_24gb:,} tokens in {step_s_24gb:.0f} s"),
    (
        "levers",
        "| {worth[joined adapters, r64, 4096]:.2f} to {worth[joined adapters, r16, 1024]:.2f}"
        " times, "
        "{winner_tokens_per_s:,.0f} tokens/s |",
    ),
    ("levers", "times, {cards[NVIDIA H100 80GB HBM3][winner_tokens_per_s]:,.0f} tokens/s |"),
    (
        "levers",
        "| {worth[fp8 base, r16, 4096]:.2f} to {worth[fp8 base, r64, 1024]:.2f} times, "
        "{fp8_winner_tokens_per_s:,.0f} tokens/s |",
    ),
    ("levers", "times, {cards[NVIDIA H100 80GB HBM3][fp8_winner_tokens_per_s]:,.0f} tokens/s |"),
    (
        "levers",
        "| {worth[selective_50, r16, 4096]:.2f} to {worth[selective_50, r16, 1024]:.2f} times |",
    ),
    (
        "levers",
        "a row of 16,384 tokens | {selective_over_every_2_long:.2f} times | "
        "{cards[NVIDIA H100 80GB HBM3][selective_over_every_2_long]:.2f} times |",
    ),
    (
        "levers",
        "a cap of 22 GiB | {selective_over_every_2_cap:.2f} times | "
        "{cards[NVIDIA H100 80GB HBM3][selective_over_every_2_cap]:.2f} times |",
    ),
    (
        "levers",
        "**{loss_difference_max:.2%} worst**: difference of the final loss from a training in 32"
        " bits",
    ),
    ("levers", "| no lever, bf16 | {loss_differences[none]:.2%} |"),
    ("levers", "| whole logits | {loss_differences[whole loss]:.2%} |"),
    ("levers", "| compiled layers | {loss_differences[layers compiled]:.2%} |"),
    ("levers", "| `selective_50` | {loss_differences[selective_50]:.2%} |"),
    ("levers", "| joined adapters | {loss_differences[joined adapters, layers compiled]:.2%} |"),
    ("levers", "| fp8 base | {loss_differences[fp8 base, layers compiled]:.2%} |"),
    ("levers", "| CUDA graphs | {loss_differences[CUDA graphs]:.2%} |"),
    ("levers", "one series ended {cards[NVIDIA H100 80GB HBM3][loss_difference_max]:.2%} lower"),
    (
        "levers",
        "**{compiled_graphs_over_best:.2f} times**: speed of a 1B model with one row of 512",
    ),
    (
        "levers",
        "CUDA graphs alone give {graphs_over_none:.1f} times the speed without both, and"
        " {graphs_over_compiled:.1f} times the speed of compiled layers",
    ),
    (
        "lever_checks",
        "differs most from the one in 32 bits, by {loss_difference_max:.2%}. An fp8 base ends",
    ),
    ("lever_checks", "ends {loss_differences[fp8 base, layers compiled]:.2%} higher"),
    ("lever_checks", "lowers the loss by {arriving[none, 1e-05]:.0%} of its effect in 32 bits"),
    (
        "lever_checks",
        "of 3e-5 keeps {arriving[none, 3e-05]:.0%} of this effect, an update of 1e-4 keeps"
        " {arriving[none, 0.0001]:.0%}",
    ),
    (
        "packed_attention",
        "**{packed_over_full:.2f} and {packed_over_full_short:.2f} times**: useful tokens/s of"
        " packed rows",
    ),
    (
        "packed_attention",
        "Masked packed rows reach {masked_over_full:.2f} and {masked_over_full_short:.2f} times",
    ),
    ("packed_attention", "**{loss_difference_max:.1%}**: largest difference of the losses"),
    ("labels", "token by token, for {rows:,} rows with real chat templates"),
    (
        "labels",
        "All rows agree except {rows_said:,}, and the comment at the top of each tool's exported"
        " file explains these differences",
    ),
    ("labels", "Rows that differ without an explanation: {mismatches} ("),
    ("chat_training", "**{trl_difference:.5f}**: difference of the final held-out loss"),
    ("chat_training", "trained a small Llama on the same {rows:,} conversations of several turns"),
    (
        "chat_training",
        "The loss of {held_out} held-out answers fell from {loss_before:.2f} to {loss_after:.2f}",
    ),
    ("learn", "with at most {cost_share_max:.1%} of the sweep's steps"),
    ("reports", "**{right} of {cases} right**: 20 public reports"),
    (
        "rollout_reports",
        "**{agree} of {reports} agree**: {reports} public reports about the memory",
    ),
    ("rollout_reports", "on one GPU, from {sources} sources"),
    ("rollouts", "**{phase_error_max:.1%} worst for memory, {step_error_max:.1%} for time**"),
    ("rollouts", "{ooms} runs ran out of memory"),
    ("rollouts", "**{over_defaults:.1f} times**: speed of the best layout for GRPO"),
    ("rollout_reports", "It says of {dangerous} runs that failed that they fit"),
    ("fuzz", "**{faults} faults**: {tried:,} mutated datasets and files of other tools"),
    ("lost_text", "In {tried:,} random conversations with 72 chat templates"),
    (
        "check_examples",
        "**{answered} of {files} answered**: Of the {files} example files that Axolotl,"
        " LLaMA-Factory and TRL ship",
    ),
    (
        "check_examples",
        "answers {answered} for one H100 without access to the Hub. It refuses the other"
        " {refused} files with a reason",
    ),
    (
        "check_examples",
        "{by_reason[no training]} describe no training, {by_reason[not supported]} use an"
        " unsupported feature or format, and {by_reason[model]} name a model that only the Hub",
    ),
    (
        "check_examples",
        "Another {by_reason[objective]} train with an unsupported objective, {by_reason[no"
        " count]} have a model that the dry probe cannot count, and {by_reason[tool]} names",
    ),
    ("steady", "**{false_headlines} false headlines**: five studies"),
    ("steady", "exported runs were at most {quiet_error_max:.0%} off the predicted speed"),
    ("fleet", "{workers} workers and a PostgreSQL server on two cores finished {trials:,} trials"),
    ("fleet", "The tuner itself takes {overhead_ms_one_worker:.0f} ms per trial"),
    (
        "disturbed",
        "**{trials_lost} trials lost, {extra_seconds:.0f} s more**: a study of Mistral-7B",
    ),
    ("mutation", "**{killed_share:.1%}**: Of {mutants} single changes of meaning"),
    ("mutation", "the tests noticed {killed_share:.1%}, in {minutes:.0f} minutes"),
]


def program(name: str, patch: pytest.MonkeyPatch) -> Any:
    """The module of a benchmark."""
    patch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def mode_of(result: str, patch: pytest.MonkeyPatch) -> Any:
    """Return the mode that a stored result names in its command.

    A program with a single mode names none.
    """
    python, path, *words = shlex.split(RESULTS[result]["command"])
    assert python == "python" and Path(path).parent == Path("benchmarks") and (ROOT / path).exists()
    modes = program(Path(path).stem, patch).MODES
    return modes[""] if "" in modes else modes[words[0]]


def run_mode(result: str, arguments: list[str], patch: pytest.MonkeyPatch) -> None:
    """Run the mode of a stored result with these arguments."""
    _, path, *words = shlex.split(RESULTS[result]["command"])
    modes = program(Path(path).stem, patch).MODES
    patch.setattr(sys, "argv", [path, *([] if "" in modes else words[:1]), *arguments])
    program("bench", patch).run_program(modes)


def rounded(value: Any) -> Any:
    """As it is stored, to seven digits: sums depend on the machine in the last ones."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.7g}"))


UNMEASURED = {
    "day_zero_fast",
}  # results whose first measurement is still to be made


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_each_mode_that_saves_a_result_is_named_by_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = program(path.stem, monkeypatch)
    for mode in getattr(module, "MODES", {}).values():
        if mode.result in UNMEASURED:
            assert mode.result not in RESULTS
        else:
            assert mode.result is None or mode_of(mode.result, monkeypatch) == mode


@pytest.mark.parametrize("name", RESULTS)
def test_a_summary_follows_from_its_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, beside = RESULTS[name]["summary"], BESIDE_ROWS.get(name, set())
    computed = mode_of(name, monkeypatch).summarize(RESULTS[name]["rows"])
    assert beside <= stored.keys()
    assert rounded(computed) == rounded(
        {key: value for key, value in stored.items() if key not in beside}
    )


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("verify", "verify_h200.jsonl"),
        ("depth_extrapolation", "depth_h200.jsonl"),
        ("plan_memory", "heldout_h200.jsonl"),
        ("claims", None),
        ("plan_published", None),
        ("plan_speed", None),
        ("plan_world", None),
        ("counted_ranks", None),
        ("plan_objectives", None),
        ("projection", None),
        ("transfer", None),
    ],
)
def test_rows_follow_from_what_was_measured(
    name: str, measured: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where formulas of the package are part of a row, a change of these shows here."""
    options = ["--rows", str(BENCHMARKS / "data" / measured), "--seconds", "0"] if measured else []
    options = (
        ["--counted", str(BENCHMARKS / "results" / f"{name}.json")]
        if name == "counted_ranks"
        else options
    )
    if name in ("plan_memory", "plan_objectives"):
        options += ["--counted", str(BENCHMARKS / "results" / f"{name}.json")]
    run_mode(name, [*options, "--out", str(tmp_path)], monkeypatch)
    made = json.loads((tmp_path / f"{name}.json").read_text())
    for key in ("fingerprint", "summary", "rows"):
        assert rounded(made[key]) == rounded(RESULTS[name][key]), key


def test_searches_take_as_long_as_the_result_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one seed, which ours does not depend on.

    A change of how the product searches shows here.
    """
    search = program("search", monkeypatch)
    table, row = search.Table(search.TABLE), RESULTS["search_efficiency"]["rows"][0]
    goal = table.best() * (1 - search.WITHIN)
    assert {
        name: run(table, row["seed"], goal) for name, run in search.SEARCHES.items()
    } == pytest.approx({name: row[name] for name in search.SEARCHES})


def test_packed_rows_are_compared_with_the_full_rows_around_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = program("packing", monkeypatch)
    assert sum(module.SHORT) / len(module.SHORT) == pytest.approx(128, abs=0.5)
    speeds = {
        "full": 90.0,
        "usual, mask": 85.0,
        "usual, varlen": 101.0,
        "short, varlen": 120.0,
        "full again": 110.0,
    }
    rows: list[dict[str, Any]] = [
        {"case": case, "outcome": "ok", "tokens_per_s": one} for case, one in speeds.items()
    ]
    rows += [{"case": "short, mask", "outcome": "oom"}]
    rows += [
        {"losses_of": "mask", "losses": [10.0, 4.0]},
        {"losses_of": "varlen", "losses": [10.0, 5.0]},
    ]
    assert module.summarize_attention(rows) == pytest.approx(
        {
            "cases": 8,
            "full_differs": 110 / 90 - 1,
            "packed_over_full": 1.01,
            "masked_over_full": 0.85,
            "packed_over_full_short": 1.2,
            "loss_first": 10.0,
            "loss_last": 4.0,
            "loss_difference_max": 0.2,
        }
    )
    assert module.summarize_attention(rows[:1])["full_differs"] == 0 and module.summarize_attention(
        []
    ) == {"cases": 0}


PACKED = {"full": 9.0, "usual, varlen": 12.0, "full again": 11.0}


def test_levers_are_measured_with_and_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module = program("levers", monkeypatch)
    asked = SimpleNamespace(model="mistral-7b", memory_gib=75.0, first=False)
    every = module.side_cases(asked)
    assert len({(part, lever, model, config) for part, lever, model, config, _ in every}) == len(
        every
    )
    # each configuration is the one that its lever names
    for part, lever, _, config, memory_gib in every:
        assert ("CUDA graphs" in lever) is (config.cuda_graphs == "micro_batch")
        assert memory_gib == {"cap": 22.0, "graphs": 70.0}.get(part, 75.0)
        if part in ("cap", "long rows"):
            assert (config.checkpointing, config.compile) == (lever, "per_layer")
    # A CPU has no CUDA graphs.
    assert set(module.CHECKS_LEVERS) - set(module.levers_of(module.torch.device("cpu"))) == {
        "CUDA graphs"
    }
    assert module.levers_of(module.torch.device("cuda")) == list(module.CHECKS_LEVERS)
    asked.first = True
    assert {case[:4] for case in module.side_cases(asked)} < {case[:4] for case in every}
    rows: list[dict[str, Any]] = [
        {"part": "cap", "lever": "every_2", "tokens_per_s": 10.0},
        {"part": "cap", "lever": "every_2", "outcome": "oom"},
        {"part": "cap", "lever": "selective_30", "tokens_per_s": 12.0},
        {"part": "graphs", "lever": "1 x 512", "tokens_per_s": 2.0},
        {"part": "graphs", "lever": "1 x 512, CUDA graphs", "tokens_per_s": 3.0},
        {
            "part": "gradients",
            "lever": "CUDA graphs",
            "gradient_difference": 0.01,
            "loss_difference": 0.02,
        },
        {"part": "losses", "check": "selective_30", "difference": -0.003},
        {"part": "losses", "check": "fp8 base", "difference": -0.002},
        {"part": "losses", "check": "in 32 bits", "last_loss": 4.0},
        {"part": "updates", "check": "none", "update": 1e-5, "share": 0.1},
    ]
    without, with_it = (one.label() for one in module.sides_of("fp8 base", 16, 1024))
    rows += [{"part": "sides", "lever": "", "config": without, "tokens_per_s": 4.0}]
    rows += [{"part": "sides", "lever": "", "config": with_it, "tokens_per_s": 5.0}]
    rows += [
        {"part": "packed", "case": case, "outcome": "ok", "tokens_per_s": speed}
        for case, speed in PACKED.items()
    ]
    other = {"part": "graphs", "lever": "1 x 512, compiled", "tokens_per_s": 1.0, "card": "another"}
    summary = module.summarize_sides([*[row | {"card": "one"} for row in rows], other])
    assert set(summary.pop("cards")) == {"one", "another"}
    known = {key: value for key, value in summary.items() if value is not None}
    assert known.pop("worth") == {"fp8 base, r16, 1024": 1.25}
    assert known.pop("loss_differences") == {"selective_30": -0.003, "fp8 base": -0.002}
    assert known.pop("arriving") == {"none, 1e-05": 0.1}
    assert known == pytest.approx(
        {
            "winner_tokens_per_s": 4.0,
            "fp8_winner_tokens_per_s": 5.0,
            "packed_over_full": 1.2,
            "selective_over_every_2_cap": 1.2,
            "graphs_over_none": 1.5,
            "graph_gradient_difference": 0.01,
            "graph_loss_difference": 0.02,
            "loss_difference_max": 0.003,
        }
    )
    alone = module.summarize_sides(
        [other | {"lever": "1 x 512, CUDA graphs"}, rows[3] | {"card": "one"}]
    )
    assert alone["graphs_over_none"] is None  # two cards are not compared
    assert module.summarize_sides([]).pop("cards") == {}


def test_differences_of_losses_are_summarized_over_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    module = program("mixture_quality", monkeypatch)
    rows: list[dict[str, Any]] = [{"pair": "base", "loss_first": 5.5, "loss": 2.0}]
    for pair, first, sides in [
        ("split", 2.0, [(1.01, 1.0), (0.99, 1.0)]),
        ("nf4", 2.2, [(1.1, 1.1), (1.21, 1.1)]),
    ]:
        rows += [
            {
                "pair": pair,
                "seed": seed,
                "loss_first": first,
                "loss": loss,
                "reference_loss_first": first,
                "reference_loss": reference,
                "difference": loss / reference - 1,
            }
            for seed, (loss, reference) in enumerate(sides)
        ]
    assert module.summarize(rows) == pytest.approx(
        {
            "loss_before": 5.5,
            "loss_after": 2.0,
            "seeds": 2,
            "split_difference_mean": 0.0,
            "split_difference_spread": 0.0002**0.5,
            "split_difference_size": 0.01,
            "split_difference_max": 0.01,
            "split_fall": 0.495,
            "split_between_seeds": 0.0,
            "nf4_difference_mean": 0.05,
            "nf4_difference_spread": 0.005**0.5,
            "nf4_difference_size": 0.05,
            "nf4_difference_max": 0.1,
            "nf4_fall": 0.45,
            "nf4_between_seeds": 0.0,
            "nf4_rise": 0.1,
        }
    )
    # A spread needs two seeds.
    alone = module.summarize([row for row in rows if row.get("seed") != 1])
    assert alone["seeds"] == 1 and alone["split_difference_spread"] is None


def test_the_long_tailed_lengths_are_those_that_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module = program("packing", monkeypatch)
    lengths = module.long_tailed_lengths()
    assert lengths == module.long_tailed_lengths() and len(lengths) == 3000
    assert (
        sum(lengths) / 3000 == pytest.approx(376, abs=0.5)
        and max(lengths) == 4096
        and min(lengths) >= 16
    )


def test_who_sets_the_pace_of_a_pair_follows_from_how_long_the_cards_were_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host has 0.8 of a micro batch where the device is busy for the fourth root of 1 - 0.8^4 of
    it: 0.8765.
    """
    transfer = program("transfer", monkeypatch)
    cards = [transfer.read_card(path) for path in transfer.STORED]
    rows = [row for row in RESULTS["transfer"]["rows"] if "target" in row]
    assert {row["host_bound"] for row in rows} == {True, False}
    for row in rows:
        kernels = [card.found[row["model"], row["config"], None][1].kernels for card in cards]
        assert row["host_bound"] is (min(each.busy_s / each.micro_s for each in kernels) <= 0.8765)


def test_what_the_product_says_of_one_chip_was_fitted_on_one_model() -> None:
    assert round(RESULTS["transfer"]["summary"]["fitted_exponent"], 2) == OF_MEMORY


def test_two_depths_give_what_a_whole_model_was_measured_to_hold() -> None:
    """Full fine-tuning with the loss in chunks, whose peak is in the head with few layers."""
    stored = (BENCHMARKS / "data" / "truncated_h100.jsonl").read_text().splitlines()
    found = {row["depth"]: row for row in map(json.loads, stored) if row["model"] == "llama-3.2-1b"}
    counts = {
        depth: DryCount(
            model_gib=1.0,
            adapters_gib=0.0,
            gradients_gib=1.0,
            optimizer_gib=1.0,
            segment_peak_gib=row["segment_peak_gib"],
            peak_allocated_gib=row["peak_allocated_gib"],
            trainable_params=1,
            total_params=1,
        )
        for depth, row in found.items()
    }
    predicted = count_at_depth((2, counts[2]), (4, counts[4]), 16)
    assert predicted.peak_allocated_gib == pytest.approx(
        found[None]["peak_allocated_gib"], rel=1e-5
    )
    assert predicted.segment_peak_gib == pytest.approx(found[None]["segment_peak_gib"], rel=1e-5)


def test_rows_are_labelled_as_train_py_labels_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    labels = program("labels", monkeypatch)
    case = "alpaca, no template"
    monkeypatch.setattr(labels, "CASES", {case: labels.CASES[case]})
    monkeypatch.setattr(labels, "NUMBER", 3)
    ours = labels.make_cases(tmp_path)
    assert [len(tokens) == len(trained) for tokens, trained in ours[case]] == [True] * 3
    assert all(trained[0] == -100 and trained[-1] == tokens[-1] for tokens, trained in ours[case])


@pytest.mark.parametrize(("name", "text"), SAID)
def test_the_documents_say_what_was_measured(name: str, text: str) -> None:
    evidence = " ".join(
        (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8").split()
    ).replace(" %", "%")
    assert text.format(**RESULTS[name]["summary"]) in evidence


def page_of(name: str) -> str:
    """The text of a page of the documentation, in one line."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    return " ".join(text.split()).replace(" %", "%")


def test_the_documents_say_what_fp8_products_gain_in_each_setting() -> None:
    stored = RESULTS["fp8_full"]
    rows = {tuple(row["case"].split(", ")): row for row in stored["rows"]}
    speeds = {case: row["tokens_per_s"] for case, row in rows.items()}
    evidence, knobs = page_of("evidence"), page_of("knobs")
    with_one: list[str] = []
    for scales in ("tensorwise", "rowwise"):
        gains = {
            setting: speed / speeds["none", setting]
            for (side, setting), speed in speeds.items()
            if side == scales
        }
        assert max(gains.values()) == gains.pop("two rows")
        with_one.append(f"{min(gains.values()):.2f} to {max(gains.values()):.2f}")
        assert f"{with_one[-1]} times" in evidence
    assert {speed for (_, setting), speed in speeds.items() if setting == "two rows"} == {
        stored["summary"][f"{side}_tokens_per_s"] for side in ("bf16", "tensorwise", "rowwise")
    }
    assert ("rowwise", "recomputed") not in rows and len(rows) == 11

    summary = stored["summary"]
    assert f"{summary['tensorwise_over_bf16']:.2f} times as fast as in bf16 with" in knobs
    assert f"and {summary['rowwise_over_bf16']:.2f} times as fast with `rowwise`" in knobs
    assert f"it trains {' and '.join(with_one)} times as fast" in knobs
    reserved = [rows[side, "kept"]["peak_reserved_gib"] for side in ("none", "tensorwise")]
    assert f"each of two H200s reserved {reserved[0] - reserved[1]:.0f} GiB less in total" in knobs


def test_the_documents_say_how_far_losses_with_fp8_products_spread() -> None:
    stored, rows = RESULTS["fp8_losses"]["summary"], RESULTS["fp8_losses"]["rows"]
    losses = {(row["scales"], row["seed"]): row["loss"] for row in rows if row["scales"] != "base"}
    tensors, rowwise = (
        sorted(losses[side, seed] / losses["none", seed] - 1 for seed in range(6))
        for side in ("tensorwise", "rowwise")
    )
    assert len(losses) == 3 * 6 == 3 * stored["seeds"]
    evidence, knobs = page_of("evidence"), page_of("knobs")
    assert f"five differences lie between {tensors[0]:.2%} and {tensors[4]:+.2%}, and" in evidence
    assert f"six differences lie between {rowwise[0]:.2%} and {rowwise[-1]:+.2%}." in evidence
    assert f"The loss fell by {1 - stored['loss_over_first']:.0%} on average" in evidence
    first, second = (row["loss"] for row in rows if row["scales"] == "base")
    assert f"the held-out losses differ by {first / second - 1:.1%}." in evidence
    for side, found in (("tensorwise", tensors), ("rowwise", rowwise)):
        assert (
            f"(from {-found[0]:.2%} lower to {found[-1]:.2%} higher)" in knobs
            and f"{stored[f'{side}_difference']:.2%} higher" in knobs
        )
    decision = page_of("decisions/22-number-formats")
    assert f"by at most {tensors[-1]:.1%} with `tensorwise`" in decision
    assert f"by at most {rowwise[-1]:.1%} with `rowwise`" in decision


def test_what_was_not_measured_of_a_fault_is_no_zero() -> None:
    page = table({("a fault", "replayed"): [[1, 1, 0, None], [1, 1, 0, None]]})
    assert page.endswith("| a fault | replayed | 2 | 2 | 0 | not measured |\n")


def test_plan_says_how_accurate_it_is() -> None:
    text = "within {error_max:.1%} for the {fitted_models} models on an H200 that it was fitted to,"
    text += (
        " and {heldout_error_max:.1%} for {heldout_models} others (LoRA, nf4, full fine-tuning)."
        " The speed comes from another formula,"
    )
    text += " {heldout_pace_error_median:.0%} off"
    assert text.format(**RESULTS["plan_memory"]["summary"]) in ACCURACY.replace(" %", "%")


def test_plans_of_other_objectives_say_how_accurate_they_are() -> None:
    text = (
        "within {error_max:.1%} for {configs} trainings for dpo, kto, reward and classification"
        " on an H200 (six models,"
    )
    text += (
        " LoRA, every layer recomputed). The speed comes from another formula,"
        " {time_error_median:.0%} off"
        " in the median of these trainings and"
    )
    text += " {time_error_max:.0%} at worst"
    found = RESULTS["plan_objectives"]["summary"]
    assert found["models"] == 6 and text.format(**found) in OF_OBJECTIVES.replace(" %", "%")


def test_plan_says_how_accurate_counts_are() -> None:
    said = COUNTED.replace(" %", "%")
    counted = (
        "{device_bound_counted_error_median:.1%} off in the median of {models} dense models"
        " on an H200"
    )
    counted += (
        " in GPU-bound steps. For {unknown_models} others on an H100, it is"
        " {unknown_counted_error_median:.1%} off ({unknown_first_error_median:.0%} before"
    )
    assert counted.format(**RESULTS["counted_speed"]["summary"]) in said
    memory = (
        "{error_median:.1%} off in the median and {error_max:.1%} at worst for {families}"
        " model families"
    )
    assert memory.format(**RESULTS["dry_probe"]["summary"]) in said


def test_plans_of_several_gpus_say_how_accurate_they_are() -> None:
    own, counted = (RESULTS[name]["summary"] for name in ("plan_world", "counted_ranks"))
    said = (
        f"at most {own['own_memory_error_max']:.1%} for the four measured ranks and"
        f" {counted['error_max']:.1%} for the"
    )
    assert f"{said} {counted['ranks']} ranks that dry probes computed" in RANK_ACCURACY.replace(
        " %", "%"
    )
    mixtures = RESULTS["mixture_ranks"]["summary"]
    assert f"{mixtures['error_max']:.1%} off for {mixtures['ranks']} ranks" in (
        COUNTED_RANKS.replace(" %", "%")
    )
    missing: dict[bool, list[float]] = {True: [], False: []}
    for row in RESULTS["mixture_ranks"]["rows"]:
        is_full = row["config"].startswith("full ") and "ckpt-full" in row["config"]
        missing[is_full].append(-row["error"])
    assert f"up to {max(missing[True]):.1%} too low in full fine-tuning" in (
        COUNTED_RANKS.replace(" %", "%")
    )
    assert f"at most {max(missing[False]):.1%} too low otherwise" in (
        COUNTED_RANKS.replace(" %", "%")
    )
    assert (len(missing[True]), len(missing[False])) == (23, 69)
    assert mixtures["error_max"] < COUNTED_RANK_ERROR and mixtures["error_median"] < 0.001
    of_counted = (
        f"For {counted['ranks']} ranks of five models, it differs from counts on the meta device by"
        f" {counted['error_median']:.1%} in the median, and by {counted['error_max']:.1%} at worst"
    )
    document = " ".join(
        (ROOT / "docs" / "many-gpus.md").read_text(encoding="utf-8").split()
    ).replace(" %", "%")
    assert of_counted in document
    assert f"at most {own['own_memory_error_max']:.1%} below four ranks" in document
    waits = RESULTS["waiting"]["summary"]
    rows = [
        f"{waits['drawn']} with drawn sequences, with shares of up to"
        f" {waits['largest_share']:.2f} | {waits['error_max']:.2f}",
        f"{waits['grouped']} with sequences grouped by length | {waits['grouped_error_max']:.2f}",
        f"{waits['dealt']} with sequences dealt out by length | {waits['dealt_error_max']:.2f}",
        f"2 to 8 GPUs | {waits['of_drawn_least']:.2f} to {waits['of_drawn_most']:.2f},"
        f" {waits['of_drawn_median']:.2f} in the median",
        "one GPU, which only pads less, micro batches of 4 |"
        f" {waits['alone_of_drawn_least']:.2f} to {waits['alone_of_drawn_most']:.2f}",
    ]
    assert [row for row in rows if f"| {row} |" not in document] == []


def test_the_documents_say_which_versions_were_measured() -> None:
    """Those of the GPU, and those of the tests, which no GPU ran."""
    studies = [json.loads(path.read_text()) for path in (ROOT / "studies").glob("*/summary.json")]
    fingerprints = [
        found["fingerprint"] for found in (*RESULTS.values(), *studies) if found["fingerprint"]
    ]
    without_device = {name for name, found in RESULTS.items() if not found["fingerprint"]}
    of_data = {
        "check_examples",
        "claims",
        "counted_ranks",
        "estimators",
        "mixture_ranks",
        "plan_objectives",
        "plan_published",
        "plan_speed",
        "plan_world",
        "projection",
        "transfer",
        "waiting",
    }
    of_rows = {"fuzz", "labels", "lost_text", "reports", "rollout_reports"}
    others = {"catalogue", "day_zero", "fleet", "gate", "mutation", "strange_inputs"}
    assert without_device <= others | of_rows | of_data
    for path in (BENCHMARKS / "data").glob("transfer_*.jsonl"):  # a result of two cards
        fingerprints.append(json.loads(path.read_text().splitlines()[0])["fingerprint"])
    on_gpus = [found["packages"] for found in fingerprints if found["device"].startswith("NVIDIA")]
    assert len(on_gpus) > 15
    ((torch, transformers),) = {
        (packages["torch"], packages["transformers"]) for packages in on_gpus
    }
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("t")
    )
    for name in ("docs/install.md", "docs/evidence.md"):
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert f"torch {torch} and transformers {transformers}" in text
        assert f"torch {pins['torch']} and transformers {pins['transformers']}" in text
    told = " ".join((ROOT / "studies" / "README.md").read_text(encoding="utf-8").split())
    assert f"torch {torch}, transformers {transformers}" in told


def test_a_recording_has_the_moments_and_nothing_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = program("first_minutes", monkeypatch)
    assert module.readme_options()[:4] == ["--gpu", "cpu", "--model", "demo-3m"]
    frames = [
        (1.0, " baseline  lora\r\n"),
        (2.5, "\x1b[2K  best  trial 0, 1,0"),
        (3.0, "23 tokens/s\r\n"),
    ]
    frames.append((9.0, "     next  try"))
    made = module.Recording(frames=frames)
    moments = {name: made.moment(pattern) for name, pattern in module.MOMENTS.items()}
    assert moments == {"plan_s": 1.0, "first_number_s": 3.0, "first_oom_s": None, "answer_s": 9.0}
    header, *events = map(json.loads, module.as_cast(made, 100, 30, "autotune run").splitlines())
    assert (header["version"], header["width"], header["height"]) == (2, 100, 30)
    assert [event[0] for event in events] == [1.0, 2.5, 3.0, 9.0] and {
        event[1] for event in events
    } == {"o"}
    made.frames.append((9.5, f"scp you@gpu-box:{Path.home()}/report.html"))
    with pytest.raises(SystemExit, match="words of this machine"):
        module.as_cast(made, 100, 30, "autotune run")


@pytest.mark.parametrize("columns", [100, 160])
@pytest.mark.parametrize(
    ("name", "file"), [("readme", "first-minutes"), ("h100", "first-minutes-h100")]
)
def test_the_committed_recordings_end_with_the_answer(
    name: str, file: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = program("first_minutes", monkeypatch)
    lines = (ROOT / "docs" / "recordings" / f"{file}-{columns}.cast").read_text().splitlines()
    frames = [(seconds, text) for seconds, _, text in map(json.loads, lines[1:])]
    made = module.Recording(frames=frames)
    row = next(
        one
        for one in RESULTS["first_minutes"]["rows"]
        if (one["name"], one["columns"]) == (name, columns)
    )
    for moment, pattern in module.MOMENTS.items():
        assert made.moment(pattern) == row[moment], moment
    assert min(later - sooner for (sooner, _), (later, _) in pairwise(frames)) >= 0.0
    last = "".join(text for _, text in frames).rpartition("\x1b[H")[2]
    assert all(word in last for word in ("winner", "sure", "next", "autotune explain"))
    assert ("example card" in last) == (name == "readme")


def test_the_size_of_an_install_counts_packages_without_bytecode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = program("first_minutes", monkeypatch)
    for name, size in {
        "autotune/core/units.py": 3,
        "autotune/core/__pycache__/units.cpython-311.pyc": 5,
        "pip/main.py": 7,
        "setuptools-65.5.0.dist-info/METADATA": 11,
        "six.py": 13,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size * 1000))
    assert module.installed_mb(tmp_path) == (0.016, 0.005)
    rows = [{"install_s": 9.0, "plan_s": 2.0, "mb": 21.0, "bytecode_mb": 14.0}]
    rows[0] |= {"data_mb": 26.0, "data_install_s": 1.0, "examples": dict(module.TABLES)}
    rows.append(rows[0] | {"install_s": 8.0, "plan_s": 3.0})
    found = module.summarize_light(rows)
    assert (found["light_install_s"], found["plan_answer_s"], found["light_mb"]) == (9.0, 3.0, 21.0)
    assert (found["commands"], found["data_mb"], found["tables_read"]) == (8, 26.0, True)
    rows[1] |= {"examples": {}}
    assert not module.summarize_light(rows)["tables_read"]


def test_the_page_of_trainers_has_the_measured_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RESULTS["side_by_side"]["rows"]
    page = (ROOT / "docs" / "other-trainers.md").read_text(encoding="utf-8")
    lines = program("side_by_side", monkeypatch).table_lines(rows)
    assert "\n".join(lines) in page and len(lines) >= 2 + 4
    recomputed = {row["config"]: row.get("tokens_per_s") for row in rows if row["key"] == "trl"}
    default = recomputed["micro batch 8, recomputation full"]
    assert f"and then reaches {default:,.0f} tokens/s" in " ".join(page.split())


def test_a_cold_study_is_within_the_goal_when_its_trial_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the long study's speeds of the same GPU: one that a noisy probe found fast does not
    count.
    """
    module = program("study", monkeypatch)

    def study(
        stage: str,
        card: str,
        *trials: tuple[float, str, float | None],
        compile_s: float = 0.0,
        model: str = "mistral-7b",
    ) -> dict[str, Any]:
        keys = ("end_s", "config", "tokens_per_s")
        found = [dict(zip(keys, one, strict=True)) for one in trials]
        return {"stage": stage, "card": card, "budget_s": 120.0, "trials": found} | {
            "compile_s": compile_s,
            "probe_s": 100.0,
            "model": model,
        }

    card, other = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
    early = (
        (30.0, "noisy", 1200.0),
        (50.0, "too slow", 970.0),
        (70.0, "good", 960.0),
        (70.0, "out of memory", None),
    )
    rows = [
        study("ahead", card, *early, (130.0, "late", 999.0), compile_s=8.0),
        study("never", card, *early[:1], compile_s=60.0),
        study("long", card, (20.0, "noisy", 900.0), (90.0, "good", 990.0), (200.0, "best", 1000.0)),
        study("ahead", other, *early[:3], compile_s=12.0),
        *(study(stage, card, *early, model=module.LARGE) for stage in ("ahead", "long")),
        {
            "stage": "beside",
            "card": card,
            "model": "mistral-7b",
            "micro_change": -0.004,
            "peak_change": 0.001,
            "alone_change": 0.003,
        },
    ]
    assert module.summarize_cold(rows) == {
        "h100_seconds_to_2_percent": 70.0,
        "h200_seconds_to_2_percent": None,  # no long study ran there
        "judged_in_120_s": 3,
        "judged_in_120_s_without": 1,
        "large_seconds_to_5_percent": 30.0,
        "compile_wait_share": 0.12,
        "compile_wait_share_without": 0.6,
        "probe_change_max": 0.004,
        "alone_change_max": 0.003,
    }
    assert set(module.summarize_cold([]).values()) == {None}


def test_ours_is_compared_with_the_best_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    module = program("side_by_side", monkeypatch)
    rows = [
        {"key": module.EQUAL, "card": "1", "tokens_per_s": 12.0},
        {"key": module.EQUAL, "card": "1", "tokens_per_s": 15.0},
        {"key": module.STUDY, "card": "2", "tokens_per_s": 22.0},
        {"key": "trl", "card": "1", "tokens_per_s": 10.0},
        # a faster card, on which ours was not measured
        {"key": "trl", "card": "2", "tokens_per_s": 11.0},
        {"key": "unsloth", "card": "1", "tokens_per_s": None},
    ]
    found = module.summarize(rows)
    assert (found["ours_tokens_per_s"], found["best_other"], found["ratio"]) == (15.0, "trl", 1.5)
    assert (found["ratios"], found["study_ratio"]) == ({"1": 1.5}, 2.0)
    assert (found["others"], found["not_measured"]) == (1, ["unsloth"])
    assert module.summarize([])["ratio"] is None


def test_kernels_of_mixtures_are_compared_if_their_layer_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = program("mixtures_beside", monkeypatch)
    rows = [
        {"project": "autotune", "outcome": "ok", "tokens_per_s": 12.0},
        {"project": "autotune", "outcome": "ok", "tokens_per_s": 15.0},
        {"project": "autotune", "outcome": "oom"},
        {"project": "unsloth", "outcome": "right"},
        {"project": "unsloth", "outcome": "ok", "tokens_per_s": 8.0, "checked": True},
        {"project": "unsloth", "outcome": "ok", "tokens_per_s": 10.0, "checked": True},
        {"project": "axolotl", "outcome": "ok", "tokens_per_s": 90.0, "checked": False},
    ]
    assert module.summarize(rows) == {
        "others": 1,
        "ratio": 1.5,
        "ours_tokens_per_s": 15.0,
        "theirs_tokens_per_s": 10.0,
        "best_other": "unsloth",
        "by_project": {"unsloth": 10.0},
    }
    assert module.summarize([])["ratio"] is None


def test_a_projects_rows_are_stored_until_its_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = program("mixtures_beside", monkeypatch)
    child = tmp_path / "child.py"
    child.write_text(
        "import json, sys\n"
        "task = json.load(open(sys.argv[2]))\n"
        "print('a message')\n"
        "print('ROW ' + json.dumps({'project': sys.argv[1], 'outcome': 'ok', 'config': '8 rows',"
        " 'tokens_per_s': 10.0, 'checked': True, 'done': task['done']}))\n"
        "sys.exit('out of order' if '8 rows' in task['done'] else 3)\n"
    )
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text('{"project": "axolotl", "config": "check", "outcome": "right"}\n')
    monkeypatch.setattr(module, "CHILD", child)
    options = ["--only", "axolotl", "--rows", str(earlier), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["mixtures_beside.py", *options])
    program("bench", monkeypatch).run_program(module.MODES)

    found = json.loads((tmp_path / "mixtures_beside.json").read_text())
    assert found["summary"]["by_project"] == {"axolotl": 10.0}
    assert [row.get("done") for row in found["rows"][1:3]] == [["check"], ["check", "8 rows"]]
    assert "out of order" in found["rows"][3]["reason"]
    assert "a message" in (tmp_path / "mixtures_beside_axolotl.log").read_text()


def test_the_longest_row_counts_under_the_memory_of_its_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = program("longest", monkeypatch)
    row = {"depth": None, "outcome": "ok", "step_s": 9.0, "need_gib": 20.0, "host_gib": 8.0}
    rows = [
        row | {"tokens": 100, "cap_gib": 23.5},
        row | {"tokens": 200, "cap_gib": 23.5, "outcome": "oom"},
        row | {"tokens": 300, "cap_gib": 23.5, "depth": 2},
        row | {"tokens": 400, "cap_gib": 79.2},
    ]
    found = module.summarize(rows)
    assert (found["tokens_24gb"], found["tokens_80gb"]) == (100, 400)
    assert module.summarize(rows[1:3])["tokens_24gb"] is None


def test_two_gpus_are_compared_with_one_if_both_were_studied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    summarize = program("two_gpus", monkeypatch).summarize_studies
    two = {"study": "two", "tokens_per_s": 34e3, "confirmed": True, "first_compiled_s": 40.0}
    one = {"study": "one", "tokens_per_s": 17e3, "confirmed": False}
    assert summarize([two])["scaling"] is None and summarize([two])["first_compiled_s"] == 40.0
    both = summarize([two, one])
    assert both["scaling"] == 2.0 and both["confirmed"] is False
    assert both["full8b_tokens_per_s"] is None
