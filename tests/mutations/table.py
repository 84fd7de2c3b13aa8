"""Small changes of meaning to code that decides bytes and safety, with the tests that must notice them."""

from __future__ import annotations

from dataclasses import dataclass

METHODS = "methods/test_methods_reference.py methods/test_methods_kit.py"
LAYOUT = "checkpoints/test_checkpoint_header.py"
PLAN = "planner/test_planner_tables.py planner/test_planner_planned.py"
CHECK = "planner/test_planner_check.py"
RESUME = "runtime/test_runtime_signals.py runtime/test_runtime_shards.py runtime/test_runtime_run.py"
SHARDS = "runtime/test_runtime_shards.py runtime/test_runtime_signals.py"
LEASE = "runtime/test_runtime_lease.py"
ADAPTERS = "runtime/test_runtime_adapters.py"
CODECS = "checkpoints/test_codecs.py"
QUANTISED = "quantised/test_quantised_merges.py"
SCALES = "quantised/test_quantised_scale_groups.py"
STACKS = "quantised/test_quantised_stacks.py"
HOSTILE = "quantised/test_quantised_hostile.py"
VERIFIER = "verifier/test_verifier_structure.py"
FINITE = "execute/test_execute_output.py"
REPORT = "cli/test_cli_report_page.py verifier/test_verifier_observations.py"
TRANSPLANT = "transplant/test_transplant.py"
STORAGE = "storage/test_storage_local.py storage/test_storage_addresses.py"
JOINT = "execute/test_execute_joint.py"
LOSS = "loss/test_loss.py"
CALIBRATION = "calibration/test_calibration_experts.py"
FISHER = "calibration/test_calibration_fisher.py"
REGMEAN = "calibration/test_calibration_regmean.py"
SEARCH = "recipe_search/test_search_job.py recipe_search/test_search_strategies.py"
SWEEP = "runtime/test_runtime_sweep.py"
REMOTE_SWEEP = "runtime/test_runtime_sweep_remote.py"
PUSH = "publish/test_publish_hub_push.py"


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change."""

    file: str
    """Path below ``raymerge``."""
    old: str
    """Text that stands there once."""
    new: str
    """What takes its place."""
    tests: str
    """Files below ``tests``, one of which must fail."""


_SPELLINGS = "planner/test_planner_spellings.py"
_RANDOM = "methods/test_methods_random.py"
_TRIM = f"methods/test_methods_reduce.py {METHODS}"
_REFERENCE = "methods/test_methods_reference.py"
_TIES = "planner/test_planner_ties.py"
_REPORT = "runtime/test_runtime_report.py"
_OUTPUT = "execute/test_execute_output.py"
_V4 = "planner/test_planner_deepseek_v4.py"
_REPAIR = "calibration/test_router_repair.py"

MUTATIONS = (
    # What methods compute
    Mutation(
        "methods/linear.py",
        "if settings.flag(_NORMALIZE):\n            return combine",
        "if not settings.flag(_NORMALIZE):\n            return combine",
        METHODS,
    ),
    Mutation("methods/linear.py", "== (1.0,) else None", "!= () else None", METHODS),
    Mutation("methods/slerp.py", "of_source if state.from_base else of_base", "of_source", METHODS),
    Mutation("methods/slerp.py", "abs(cosine) > _PARALLEL", "cosine > _PARALLEL", METHODS),
    Mutation("methods/combine.py", "math.sin((1.0 - t) * angle)", "math.sin(t * angle)", METHODS),
    Mutation(
        "methods/slerp.py",
        "base_source / norms if norms else 0.0",
        "base_source / norms if norms else 1.0",
        METHODS,
    ),
    Mutation("methods/nearswap.py", "_LEAST = 1e-6", "_LEAST = 1e-3", METHODS),
    Mutation("methods/nearswap.py", "swapped = share >= 0.5", "swapped = share > 0.9", METHODS),
    Mutation(
        "methods/task_arithmetic.py",
        'factor = settings.number("lambda") / _total_weight(settings)\n        return sum_on_base',
        'factor = settings.number("lambda")\n        return sum_on_base',
        METHODS,
    ),
    Mutation("methods/task_arithmetic.py", "abs(total) >= _ZERO_WEIGHT", "total >= _ZERO_WEIGHT", METHODS),
    Mutation(
        "methods/task_arithmetic.py",
        "factor if elect else factor / _total_weight(settings)",
        "factor",
        METHODS,
    ),
    Mutation("methods/task_arithmetic.py", "total.lt_(0.0).mul_(-2.0)", "total.le_(0.0).mul_(-2.0)", METHODS),
    Mutation(
        "methods/task_arithmetic.py",
        "divisor.add_(delta.sign_().mul_(weight))",
        "divisor.add_(weight)",
        METHODS,
    ),
    Mutation("methods/combine.py", "delta.neg_().add_(0.0), out=delta", "delta.neg_(), out=delta", METHODS),
    Mutation("methods/trim.py", "selection.tied_share >= 1 or threshold == 0", "threshold == 0", _TRIM),
    Mutation(
        "methods/trim.py",
        "marked.gt_(cut.above).add_(chosen)",
        "marked.gt_(0.5 * cut.above).add_(chosen)",
        _TRIM,
    ),
    Mutation("methods/trim.py", "cut.key, start + chunk.start,", "cut.key, chunk.start,", _TRIM),
    Mutation("methods/selection.py", "distances < 0, outside + _OUTSIDE", "distances < 0, outside", _TRIM),
    Mutation(
        "methods/reduce.py",
        "            self._totals[place] = total\n        self._places",
        "        self._places",
        _TRIM,
    ),
    Mutation("methods/trim.py", "whole / remaining if remaining > whole * _ROUNDING else 1.0", "1.0", _TRIM),
    Mutation("methods/trim.py", "upper.sum_kept - outliers.sum_kept", "upper.sum_kept", _TRIM),
    Mutation("methods/trim.py", "int(any(density < 1 for", "int(all(density < 1 for", _TRIM),
    Mutation(
        "methods/breadcrumbs.py",
        "return upper, upper - num_kept",
        "return upper, outliers",
        f"methods/test_methods_random.py {METHODS}",
    ),
    Mutation(
        "methods/breadcrumbs.py",
        "min(num_kept + outliers, num_elements)",
        "min(num_kept, num_elements)",
        f"methods/test_methods_random.py {METHODS}",
    ),
    Mutation(
        "methods/dare.py",
        "1.0 / chance if settings.flag",
        "1.0 + chance if settings.flag",
        f"methods/test_methods_random.py {METHODS}",
    ),
    Mutation(
        "methods/della.py",
        "2.0 * spread / max(1, length - 1)",
        "2.0 * spread / length",
        f"methods/test_methods_random.py {METHODS}",
    ),
    Mutation(
        "methods/della.py",
        "density - epsilon > 0 and",
        "density - epsilon >= 0 and",
        "methods/test_methods_random.py",
    ),
    Mutation(
        "methods/sce.py",
        "square / total if total else 1.0 / count",
        "square if total else 1.0 / count",
        f"methods/test_methods_sce.py {METHODS}",
    ),
    Mutation("methods/model_stock.py", "_POLE = 1e-6", "_POLE = 1e-1", METHODS),
    Mutation(
        "methods/combine.py",
        "total: torch.Tensor = vectors[0] * coefficients[0]",
        "total: torch.Tensor = vectors[0].clone()",
        METHODS,
    ),
    Mutation("methods/random.py", "math.ceil(density * _NUMBERS)", "math.floor(density * _NUMBERS)", _RANDOM),
    Mutation("methods/random.py", 'f"{seed}/{source}/{tensor}"', 'f"{seed}/{tensor}"', _RANDOM),
    Mutation(
        "methods/random.py", "words.view(torch.int32)[first & 1 :]", "words.view(torch.int32)[0:]", _RANDOM
    ),
    Mutation("methods/random.py", ".mul_(2.0**-52).add_(0.5)", ".mul_(2.0**-52).add_(0.25)", _RANDOM),
    # How output is laid out and cut
    Mutation("checkpoints/header.py", "(_RANK[spec.dtype], spec.name)", "spec.name", LAYOUT),
    Mutation("checkpoints/header.py", "% DATA_ALIGNMENT_NBYTES\n", "% 8\n", LAYOUT),
    Mutation(
        "checkpoints/header.py", "filled + nbytes > shard_size", "filled + nbytes >= shard_size", LAYOUT
    ),
    Mutation(
        "checkpoints/header.py",
        "current, filled, listed = [], 0, 0",
        "current, filled, listed = [], 0, listed",
        LAYOUT,
    ),
    Mutation(
        "checkpoints/header.py",
        "length > MAX_HEADER_NBYTES or length > nbytes - _LENGTH_NBYTES",
        "length > MAX_HEADER_NBYTES",
        LAYOUT,
    ),
    Mutation(
        "checkpoints/header.py",
        "if (end - begin) * 8 != num_bits:",
        "if (end - begin) * 8 < num_bits:",
        LAYOUT,
    ),
    Mutation("checkpoints/header.py", "key, data_start + begin, nbytes", "key, begin, nbytes", LAYOUT),
    Mutation("merge_plan/segments.py", "offset += piece.nbytes", "offset += piece.num_elements", PLAN),
    Mutation(
        "merge_plan/segments.py",
        "op.shard != ops[start].shard or total",
        "total",
        f"{PLAN} planner/test_planner_check.py",
    ),
    Mutation("merge_plan/segments.py", "twin if twin < len(placed) else -1", "-1", PLAN),
    Mutation("merge_plan/segments.py", "alike |= {first[place], number}", "alike |= {number}", PLAN),
    Mutation(
        "merge_plan/memory.py",
        "is_whole(each.num_elements) else each.passes",
        "is_whole(each.num_elements) else 0",
        "execute/test_execute_fused.py",
    ),
    Mutation("merge_plan/segments.py", "(first, piece.content(), joined", "(first, joined", PLAN),
    Mutation(
        "merge_plan/segments.py",
        "piece.content(), joined.get(own.joined))",
        "piece.content())",
        "planner/test_planner_quantised.py planner/test_planner_tables.py",
    ),
    Mutation(
        "merge_plan/segments.py",
        "return math.lcm(*scale_rows)",
        "return BLOCK",
        f"planner/test_planner_quantised.py {CHECK}",
    ),
    Mutation(
        "merge_plan/segments.py",
        "offset = read.offset + read.dtype.nbytes(first)",
        "offset = read.offset + first",
        f"{PLAN} planner/test_planner_check.py",
    ),
    Mutation(
        "merge_plan/expressions.py",
        "self.encode.tensor_scale_dtype is not None:\n            return False",
        "self.encode.tensor_scale_dtype is not None:\n            return True",
        "planner/test_planner_quantised.py",
    ),
    Mutation(
        "merge_plan/dispositions.py",
        "_STRENGTH[disposition.use] > _STRENGTH[old.use]",
        "_STRENGTH[disposition.use] < _STRENGTH[old.use]",
        "planner/test_planner_slices.py planner/test_planner_planned.py planner/test_planner_ties.py",
    ),
    Mutation(
        "merge_plan/dispositions.py",
        "for name in holding.stored if name not in dispositions)",
        "for name in holding.stored if not dispositions)",
        "planner/test_planner_slices.py planner/test_planner_layouts.py planner/test_planner_tables.py",
    ),
    Mutation(
        "checkpoints/source.py",
        "(one.dtype, one.shape) == (second[name].dtype, second[name].shape)",
        "one.dtype == second[name].dtype",
        "planner/test_planner_quantised.py",
    ),
    # What a plan is checked for
    Mutation("merge_plan/check_ops.py", "(nbytes > size - offset)", "(nbytes > size)", CHECK),
    Mutation("merge_plan/check_ops.py", "(offset < 0) | (nbytes < 0) |", "(nbytes < 0) |", CHECK),
    Mutation(
        "merge_plan/check_ops.py",
        "((offset + reach >= span) & ~empty)",
        "((offset + reach > span) & ~empty)",
        CHECK,
    ),
    Mutation("merge_plan/check_ops.py", '"ops", offset != reached', '"ops", offset < reached', CHECK),
    Mutation("merge_plan/check.py", "offset != reached", "offset < reached", CHECK),
    Mutation(
        "merge_plan/check_ops.py", "last & (offset + nbytes != end)", "last & (offset + nbytes > end)", CHECK
    ),
    Mutation("merge_plan/check_ops.py", "written != dtype[tensor]", "written < 0", CHECK),
    Mutation(
        "merge_plan/check_ops.py",
        'check.flag("tensors", runs != 1,',
        'check.flag("tensors", runs > 1,',
        CHECK,
    ),
    Mutation("merge_plan/check_ops.py", "return bool(seen.all())", "return bool(seen.any())", CHECK),
    Mutation(
        "merge_plan/check_ops.py",
        'check.flag("ops", is_flat & cut,',
        'check.flag("ops", is_flat & cut & False,',
        CHECK,
    ),
    # Ties of head and embedding
    Mutation(
        "planner/outputs/embeddings_and_heads.py",
        "return not source.stored_head_is_embedding",
        "return True",
        _TIES,
    ),
    Mutation(
        "planner/outputs/embeddings_and_heads.py", "tied = None if untied else False", "tied = None", _TIES
    ),
    Mutation(
        "planner/outputs/embeddings_and_heads.py",
        "return _is_tied(lead) and _sources_of(first) != _sources_of(last)",
        "return False",
        _TIES,
    ),
    Mutation(
        "planner/outputs/embeddings_and_heads.py",
        "head_name(each) if stores_own_head(each) else embedding_name(each)",
        "head_name(each)",
        _TIES,
    ),
    # What a worker writes and refuses
    Mutation(
        "execute/non_finite.py", "DType.BF16: (np.uint16, 0x7F80)", "DType.BF16: (np.uint16, 0x7FC0)", FINITE
    ),
    Mutation("execute/non_finite.py", "full = any(bool(", "full = all(bool(", FINITE),
    Mutation("execute/non_finite.py", "if lead % width or count <= 0:", "if count <= 0:", FINITE),
    Mutation("execute/non_finite.py", "return start + int(np.argmax", "return int(np.argmax", FINITE),
    Mutation("execute/output.py", "if op.check_finite and first_non_finite", "if first_non_finite", _OUTPUT),
    Mutation("execute/output.py", "raise NotFinite(op)", "pass", f"{FINITE} {_OUTPUT}"),
    Mutation(
        "execute/output.py",
        "if done < nbytes:\n                return False",
        "if done < nbytes:\n                return True",
        f"{_OUTPUT} execute/test_execute_fallback.py",
    ),
    Mutation(
        "execute/output.py",
        "begin + skipped, view) for shard, begin in op.places",
        "begin, view) for shard, begin in op.places",
        _OUTPUT,
    ),
    Mutation("execute/output.py", "view[begin : begin + nbytes]) for", "view[: nbytes]) for", _OUTPUT),
    Mutation(
        "execute/encoding.py",
        "all(each.fits and (may_differ or each.had == own.had) for each in seen)",
        "own.fits",
        QUANTISED,
    ),
    Mutation(
        "planner/outputs/routing_tables.py",
        "elif not np.array_equal(_entries(lead.checkpoint, own), _entries(source.checkpoint, table)):",
        "elif own.shape != table.shape:",
        _V4,
    ),
    Mutation("planner/moe/expert_set.py", "elif None in numbers or", "elif", _V4),
    Mutation(
        "planner/moe/expert_set.py",
        "in reversed([*enumerate(experts)]):",
        "in reversed([*enumerate(experts)][: block.num_experts - 1]):",
        _V4,
    ),
    Mutation(
        "checkpoints/quantisation/block_codec.py",
        "lost = exact.numel() - int(exact.sum())",
        "lost = int(not exact.any())",
        "quantised/test_quantised_deepseek_v4.py",
    ),
    Mutation(
        "planner/outputs/ops.py",
        "has_powers = form == FP8_BLOCK and own is not None and own.power_of_two",
        "has_powers = False",
        _V4,
    ),
    Mutation(
        "execute/encoding.py", "torch.stack([each.largest for each in seen]).amax()", "own.largest", QUANTISED
    ),
    Mutation(
        "execute/encoding.py",
        "if not math.isfinite(sums.squared_values):",
        "if False:",
        "execute/test_execute_encoding.py",
    ),
    # Codes and scales
    Mutation("checkpoints/quantisation/fp8.py", "torch.where(lost, 0x7F, codes)", "codes", CODECS),
    Mutation(
        "checkpoints/quantisation/zero_points.py", "blocks.amin(2).clamp_(max=0)", "blocks.amin(2)", CODECS
    ),
    Mutation(
        "checkpoints/quantisation/zero_points.py",
        ".transpose(1, 2)\n        return Steps",
        "\n        return Steps",
        CODECS,
    ),
    Mutation("execute/non_finite.py", "_first(bits > sign, NEGATIVE) if sign else None", "None", HOSTILE),
    Mutation("execute/stored_scales.py", "(each.is_copy and is_quantised)", "False", HOSTILE),
    Mutation("execute/stored_scales.py", "sorted({0, last // 2, last})", "[0]", HOSTILE),
    Mutation("execute/stored_scales.py", 'or self.what != "tensor_scale"', "or True", HOSTILE),
    Mutation(
        "execute/non_finite.py", "int(stored.view(_EXPONENTS[dtype][0]).max()) > sign", "False", HOSTILE
    ),
    Mutation(
        "planner/inputs/quantised.py", " and others <= stored.keys()", "", "planner/test_planner_quantised.py"
    ),
    Mutation(
        "planner/outputs/outputs.py",
        "and not self._is_unread(chosen.aligned, member, name, names)",
        "",
        "planner/test_planner_quantised.py",
    ),
    Mutation("storage/store.py", "begin = each.offset - extent.offset", "begin = 0", SCALES),
    Mutation(
        "checkpoints/quantisation/encoding.py",
        "0 < scale < 1 if is_divisor",
        "0 < scale < 1 if not is_divisor",
        f"{HOSTILE} {SCALES}",
    ),
    Mutation(
        "checkpoints/quantisation/fp8.py",
        "power_of_two_above(scales) if quant_spec.power_of_two else scales",
        "scales",
        CODECS,
    ),
    Mutation("checkpoints/quantisation/fp8.py", "_LARGEST = 448.0", "_LARGEST = 240.0", CODECS),
    Mutation(
        "checkpoints/quantisation/block_codec.py",
        "torch.where(by.steps == 0, 1.0, by.steps)",
        "by.steps",
        CODECS,
    ),
    Mutation(
        "checkpoints/quantisation/block_codec.py",
        "part.all(dim=3, keepdim=True)",
        "part.any(dim=3, keepdim=True)",
        CODECS,
    ),
    Mutation(
        "checkpoints/quantisation/block_codec.py", "whole = size // block * block", "whole = size", CODECS
    ),
    Mutation(
        "checkpoints/quantisation/nvfp4.py",
        "steps / whole if _is_factor(quant_spec)",
        "steps * whole if _is_factor(quant_spec)",
        CODECS,
    ),
    Mutation(
        "checkpoints/quantisation/modelopt.py",
        "_cache_algorithm(table, given)",
        "_cache_algorithm(table)",
        "quantised/test_quantised_modelopt.py",
    ),
    Mutation(
        "checkpoints/quantisation/detect.py",
        "elif self.plain_beside.lists(module):",
        "elif False:",
        "checkpoints/test_packed.py",
    ),
    Mutation(
        "planner/config.py",
        "if name not in donor.companions or before == after:",
        "if True:",
        "quantised/test_quantised_modelopt.py",
    ),
    Mutation("execute/lane.py", "if any(are_negative(", "if False and any(are_negative(", HOSTILE),
    Mutation("checkpoints/quantisation/encoding.py", "or len(others) * 2 <= len(scales)", "or True", HOSTILE),
    Mutation(
        "execute/encoding.py",
        "rows[:, used // 2] &= 15 if used % 2 else 0",
        "pass",
        "quantised/test_quantised_integers.py",
    ),
    Mutation(
        "planner/outputs/routing_tables.py", "(entries < 0) | (entries >= num_experts)", "entries < 0", _V4
    ),
    # One scale for what servers join
    Mutation(
        "checkpoints/quantisation/nvfp4.py",
        "view(len(pairs), -1, 2).transpose(1, 2)",
        "view(len(pairs), -1, 2)",
        STACKS,
    ),
    Mutation(
        "planner/matching/logical.py",
        "0 if quant_spec.format.scales_stack else start // size",
        "start // size",
        STACKS,
    ),
    Mutation("planner/outputs/ops.py", "only is None and len(blocks) == 1", "True", STACKS),
    Mutation("planner/outputs/ops.py", "each in own.formats or ", "", "planner/test_planner_deepseek_v4.py"),
    Mutation("checkpoints/quantisation/mxfp4.py", "cache is not None or any(", "any(", STACKS),
    Mutation(
        "planner/outputs/outputs.py",
        "is_scale and not self._plain.is_of_unread(source, lead)",
        "is_scale",
        STACKS,
    ),
    Mutation("execute/encoding.py", "(may_differ or each.had == own.had)", "True", SCALES),
    Mutation("execute/encoding.py", "(may_differ or each.had == own.had)", "each.had == own.had", QUANTISED),
    Mutation(
        "planner/outputs/scale_groups.py", "not made and len(sources) == 1", "len(sources) == 1", SCALES
    ),
    Mutation("planner/outputs/scale_groups.py", "            made = names\n", "", QUANTISED),
    Mutation(
        "checkpoints/quantisation/detect.py", "if declared.scales_inputs and self", "if self", QUANTISED
    ),
    Mutation(
        "checkpoints/quantisation/detect.py", "self._without_input_scale.append(packed.name)", "pass", SCALES
    ),
    Mutation("planner/inputs/served_scales.py", "own[0] if self.is_expert else own.max", "own.max", SCALES),
    Mutation(
        "planner/inputs/served_scales.py", "own / taken if is_divisor else taken / own", "taken / own", SCALES
    ),
    Mutation(
        "verifier/structure.py",
        "made = [each for each in matrices if not copied",
        "made = [each for each in matrices if copied",
        SCALES,
    ),
    # Workers that get on, and those that do not
    Mutation(
        "runtime/driver/in_process.py",
        "options.inline is None and options.workers is None",
        "options.inline is None",
        "runtime/test_runtime_in_process.py",
    ),
    Mutation(
        "runtime/driver/in_process.py",
        "min(on_ray + RAY_SECONDS, SMALL_SECONDS)",
        "on_ray + RAY_SECONDS",
        "runtime/test_runtime_in_process.py",
    ),
    Mutation(
        "runtime/driver/in_process.py",
        "own = sum(_seconds(merge.plan, here,",
        "own = sum(_seconds(merge.plan, options,",
        "runtime/test_runtime_in_process.py",
    ),
    Mutation(
        "cli/plan.py",
        "_explained(merge, chosen,",
        "_explained(merge, options,",
        "runtime/test_runtime_in_process.py",
    ),
    Mutation(
        "runtime/workers/ray_environment.py",
        "_jobs_environment_left_out(), ",
        "",
        "runtime/test_runtime_ray_watch.py",
    ),
    Mutation(
        "runtime/workers/agent_stand_in.py", " and _is_alive(driver)", "", "runtime/test_runtime_ray_watch.py"
    ),
    Mutation(
        "runtime/workers/ray_environment.py",
        "if place is None or node is None or None in names",
        "if place is None or node is None",
        "runtime/test_runtime_ray_watch.py",
    ),
    Mutation(
        "runtime/workers/dispatcher.py",
        "if seconds != actor.heartbeat",
        "if answer",
        "runtime/test_runtime_dispatcher.py",
    ),
    Mutation(
        "runtime/workers/dispatcher.py",
        "        while free:",
        "        if free:",
        "runtime/test_runtime_dispatcher.py",
    ),
    Mutation(
        "runtime/workers/dispatcher.py",
        "[actor for actor in free if self._hand_out(actor)]",
        "[actor for actor in free for _ in range(self._work.slots) if self._hand_out(actor)]",
        "runtime/test_runtime_dispatcher.py",
    ),
    # What a run records, resumes and publishes
    Mutation("publish/record.py", 'text = "\\n" + text', "pass", RESUME),
    Mutation("publish/record.py", "return {receipt.segment: receipt for", "return {0: receipt for", RESUME),
    Mutation(
        "publish/shards.py",
        "key is None or ranges_digest(self._reader, key, [span.extent], buffer) != span.digest",
        "key is None",
        SHARDS,
    ),
    Mutation(
        "publish/shards.py", "if lost:\n            ledger.begin(valid)", "if lost:\n            pass", SHARDS
    ),
    Mutation("publish/shards.py", 'self._store.sync(shard["name"] + UNFINISHED)', "pass", SHARDS),
    Mutation("publish/shards.py", "if sizes.get(key) == size", "if key in sizes", SHARDS),
    Mutation("publish/shards.py", 'self._store.write_at(growing, 0, shard["header"])', "pass", SHARDS),
    Mutation("publish/shards.py", "if not 0 <= number < len", "if not 0 <= number <= len", SHARDS),
    Mutation(
        "publish/shards.py",
        "(shard, offset), *(rows.row(other)[:2] for other in also)",
        "(shard, offset)",
        SHARDS,
    ),
    Mutation("publish/finish.py", "!= header:", '== b"":', "assemble/test_assemble_finish.py"),
    Mutation(
        "publish/finish.py",
        "file.nbytes != nbytes",
        "file.nbytes < nbytes",
        "assemble/test_assemble_finish.py",
    ),
    Mutation(
        "publish/lease.py", "return there.is_locked or runs_here(holder)", "return there.is_locked", LEASE
    ),
    Mutation("publish/lease.py", "return silent_seconds > DEAD_SECONDS", "return True", LEASE),
    Mutation(
        "publish/lease.py",
        "if self.look() != dead:\n                return False",
        "if False:\n                return False",
        LEASE,
    ),
    Mutation(
        "publish/lease.py",
        "if holder != self._me:\n            by",
        "if holder is None:\n            by",
        LEASE,
    ),
    Mutation(
        "publish/lease.py",
        "if there is not None and there.holder == self._me:\n                self._store.remove()",
        "if there is not None:\n                self._store.remove()",
        LEASE,
    ),
    Mutation("publish/lease.py", "began is None or began == holder.began or", "began is None or", LEASE),
    Mutation(
        "publish/output_place.py",
        'return "digest" in manifest or (CONFIG_FILE in keys and has_weights)',
        "return True",
        "runtime/test_runtime_staging.py runtime/test_runtime_chain.py",
    ),
    Mutation(
        "publish/output_place.py",
        "listed.is_complete or not _is_usual(key)",
        "not _is_usual(key)",
        "runtime/test_runtime_staging.py runtime/test_runtime_chain.py",
    ),
    Mutation(
        "publish/staging.py",
        "if foreign := [each for each in names if each not in _ADAPTER_FILES]:",
        "if foreign := []:",
        ADAPTERS,
    ),
    Mutation(
        "runtime/driver/unit_run.py",
        "check_begun(self._work.staging.parent / RECORD, self._work.attempt_id)",
        "pass",
        ADAPTERS,
    ),
    Mutation("runtime/driver/unit_run.py", "if receipt.digests == digests}", "if receipt.digests}", ADAPTERS),
    Mutation(
        "runtime/driver/adapter_run.py", "        check_apart(directory, merge.adapters)\n", "", ADAPTERS
    ),
    Mutation(
        "lora/combine.py",
        "None if expert_group(module) else self.shape.energy",
        "self.shape.energy",
        "lora/test_lora_combine.py",
    ),
    # What storage does
    Mutation(
        "storage/local/store.py",
        "self._check_end(self._read(read, path, offset), path, offset, buffer.nbytes)",
        "self._read(read, path, offset)",
        STORAGE,
    ),
    Mutation(
        "storage/local/store.py",
        "self._check_end(done, path, offset, nbytes)",
        "pass",
        f"{STORAGE} storage/test_storage_extents.py",
    ),
    Mutation(
        "storage/local/store.py", "if (before := self._lost.get(path)) is not None:", "if False:", STORAGE
    ),
    Mutation("storage/local/mapping.py", "maps.lost_pages += 1", "pass", "storage/test_storage_mapping.py"),
    Mutation(
        "storage/local/mapping.py",
        "if self._forget_range(address, address + buffer.nbytes):",
        "if False:",
        "storage/test_storage_mapping.py",
    ),
    Mutation("storage/local/mapping.py", "_LOST_PAGES.install()", "pass", "storage/test_storage_mapping.py"),
    Mutation(
        "storage/local/store.py",
        "is_whole = os.fstat(descriptor).st_size >= offset + nbytes",
        "is_whole = True",
        "storage/test_storage_mapping.py",
    ),
    Mutation(
        "execute/reading.py",
        "self._maps.release(self._buffer.numpy().data)",
        "pass",
        "execute/test_execute_reading.py",
    ),
    Mutation(
        "execute/segment.py",
        "if self._maps.lost_pages > lost_pages:",
        "if False:",
        "execute/test_execute_lanes.py",
    ),
    Mutation(
        "methods/combine.py",
        "key=lambda index: index != anchor",
        "key=lambda index: index",
        "compiled/test_compiled_combine_few.py",
    ),
    Mutation(
        "storage/local/store.py",
        "self._compare(path, os.stat(path))",
        "pass",
        "storage/test_storage_addresses.py",
    ),
    Mutation(
        "storage/retry.py",
        "for number in range(_RETRIES):",
        "for number in range(_RETRIES - 1):",
        "storage/test_storage_addresses.py",
    ),
    Mutation("storage/retry.py", "EINTR EIO ENETDOWN", "EINTR ENETDOWN", "storage/test_storage_addresses.py"),
    # What verification says
    Mutation(
        "verifier/structure.py",
        "elif planned[name] != stored:",
        "elif planned[name][:2] != stored[:2]:",
        VERIFIER,
    ),
    Mutation(
        "verifier/structure.py", "    if missing:\n        listed", "    if False:\n        listed", VERIFIER
    ),
    Mutation(
        "verifier/structure.py",
        'if dict(checkpoint.config) != plan.manifest["config"]:',
        "if False:",
        VERIFIER,
    ),
    Mutation("cli/render/report_page.py", "autoescape=True", "autoescape=False", REPORT),
    Mutation(
        "verifier/observations/correspondence.py", "(own < _LOST) & (best > _MATCH)", "best > _MATCH", REPORT
    ),
    Mutation("verifier/observations/facts.py", "FAR = 0.5", "FAR = 0.2", REPORT),
    Mutation("verifier/observations/damage.py", "is_far = is_weight[:, None] & (", "is_far = (", REPORT),
    Mutation("verifier/observations/damage.py", " & ~is_zero[:, own].any(1)", "", REPORT),
    Mutation("verifier/observations/facts.py", " or k in facts.moved or", " or", REPORT),
    Mutation("verifier/structure.py", "and len(shards) > 1:", "and len(shards) > 9:", VERIFIER),
    Mutation("verifier/structure.py", "    if current != digest:", "    if not current:", VERIFIER),
    Mutation(
        "verifier/structure.py",
        "or may_be_added(key):\n            continue",
        "or True:\n            continue",
        VERIFIER,
    ),
    # Rows of a transplanted vocabulary
    Mutation("stages/transplant.py", "left -= products", "left += products", TRANSPLANT),
    Mutation("stages/transplant.py", "_DEPENDENT = 1e-10", "_DEPENDENT = -1.0", TRANSPLANT),
    Mutation("stages/transplant.py", "at_once=_ROWS_AT_ONCE)", "at_once=2**30)", TRANSPLANT),
    Mutation("planner/transplant.py", "_of_adapters((base, donor))", "_of_adapters((base,))", TRANSPLANT),
    Mutation("planner/tokenizer/matching.py", "if row < base_rows:", "if row >= 0:", TRANSPLANT),
    Mutation(
        "planner/transplant.py", "shared = shared[shared < donor_rows]", "shared = shared[:]", TRANSPLANT
    ),
    # What a first recipe takes from strangers, and what it writes over
    Mutation(
        "planner/suggestion/models.py",
        "if each and each.isprintable() and",
        "if each and",
        "cli/test_cli_init.py",
    ),
    Mutation("planner/suggestion/models.py", "is_remote(name)", "False", "cli/test_cli_init.py"),
    Mutation("cli/init.py", "and not force:", "and False:", "cli/test_cli_init.py"),
    # Options of mergekit that would change bytes
    Mutation(
        "methods/ties.py",
        "max(math.floor(density * num_elements), int(density > 0))",
        "math.floor(density * num_elements)",
        METHODS,
    ),
    Mutation(
        "cli/mergekit.py",
        "if problems:\n                raise OptionError(problems)",
        "if False:\n                raise OptionError(problems)",
        "cli/test_cli_mergekit.py",
    ),
    Mutation("cli/mergekit.py", '"B": "GB"', '"B": "B"', "cli/test_cli_mergekit.py"),
    # No code of the current directory is run, and no password shown
    Mutation(
        "runtime/workers/ray_environment.py",
        "JobConfig(_client_job=True)",
        "JobConfig()",
        "runtime/test_runtime_ray.py",
    ),
    Mutation("diagnosis/cluster.py", '"-P", "-m"', '"-m"', "diagnosis/test_diagnosis_cluster.py"),
    Mutation("storage/addresses.py", "(?::[^/?#]*)?@", "@", "storage/test_storage_addresses.py"),
    # What a diagnosis says of nodes
    Mutation(
        "diagnosis/cluster.py",
        "if version != here.get(name)}",
        "if version and version != here.get(name)}",
        "diagnosis/test_diagnosis_cluster.py",
    ),
    # What a report measures
    Mutation("verifier/measure.py", "values if name in _UNSCALED else values * scale", "values", _REPORT),
    Mutation("verifier/measure.py", "deltas = parents - origin", "deltas = parents + origin", _REPORT),
    Mutation("verifier/measure.py", "elements**2 * (1 - read / elements)", "elements", _REPORT),
    Mutation("verifier/measure.py", "max(self._first, expert * size)", "self._first", _REPORT),
    Mutation(
        "runtime/driver/report_run.py",
        "if subject.problems and not len(result.measurements):",
        "if False:",
        _REPORT,
    ),
    # Two spellings of one model, and loaders that read a result wrongly
    Mutation("architectures/rules.py", "stated or [", "[", _SPELLINGS),
    Mutation("planner/matching/compatibility.py", "if not self._spellings(stacked):", "if True:", _SPELLINGS),
    Mutation(
        "planner/matching/logical.py",
        "if heads > 0 and tensor.shape[0] % (2 * heads) == 0 else -1",
        "if heads > 0 else -1",
        _SPELLINGS,
    ),
    Mutation("planner/matching/logical.py", "or min(heads) == 0", "or min(heads) <= 0", _SPELLINGS),
    Mutation(
        "planner/matching/input_resolver.py",
        "(which * half + index if own else 2 * index + which)",
        "(2 * index + which if own else which * half + index)",
        _SPELLINGS,
    ),
    Mutation(
        "planner/outputs/loaders.py",
        "max(2, -(-rows * apart // block))",
        "-(-rows * apart // block)",
        "planner/test_planner_loaders.py",
    ),
    Mutation(
        "planner/outputs/loaders.py",
        "n > 1 and size // n != block",
        "size // n != block",
        "planner/test_planner_loaders.py",
    ),
    # Several plans made of one read
    Mutation("merge_plan/joint.py", "padded or op.joined_with or op", "padded or op", JOINT),
    Mutation("merge_plan/joint.py", "own.append(before + numbers[key])", "own.append(numbers[key])", JOINT),
    Mutation("merge_plan/joint.py", "leaves_inputs=position < last", "leaves_inputs=False", JOINT),
    Mutation("merge_plan/joint.py", "return source\n    sizes", "return source.key\n    sizes", JOINT),
    Mutation("methods/method.py", "if self._kernel.concludes_each:", "if False:", JOINT),
    Mutation("methods/trim.py", 'without("weight", "lambda"', 'without("density", "lambda"', JOINT),
    Mutation(
        "execute/lane.py", "seed=self._lane_state.seeds[op.output]", "seed=self._lane_state.seeds[0]", JOINT
    ),
    Mutation(
        "execute/lane.py", "self._observed[op.output, each.index]", "self._observed[0, each.index]", JOINT
    ),
    Mutation("execute/segment.py", "if number not in failures]", "]", JOINT),
    Mutation(
        "merge_plan/segments.py",
        "target * op.num_elements // max(1, op.nbytes)",
        "target * op.num_elements // max(1, op.cost)",
        JOINT,
    ),
    Mutation("publish/shards.py", "self._failures.update(receipt.failures)", "pass", JOINT),
    # Several outputs of one submission
    Mutation("merge_plan/joint.py", "if in_order:", "if False:", REMOTE_SWEEP),
    Mutation("merge_plan/memory.py", "(LEAST_BLOCK + self.upload)", "LEAST_BLOCK", REMOTE_SWEEP),
    Mutation(
        "runtime/driver/sweep_run.py", "begun.shards.parts(begun.receipts)", "begun.shards.parts({})", SWEEP
    ),
    Mutation("runtime/driver/sweep_run.py", "isinstance(error, NonFiniteError) and", "False and", SWEEP),
    Mutation("runtime/driver/sweep_run.py", "numbers[at : at + most]", "numbers[at : at + 9]", SWEEP),
    Mutation("runtime/driver/sweep_run.py", "if event in self._before:", "if False:", SWEEP),
    Mutation("runtime/driver/sweep_run.py", "any(each.is_made() for each in requests)", "False", SWEEP),
    Mutation("runtime/driver/run.py", "not is_local or is_untouched(", "not is_local or bool(", SWEEP),
    Mutation(
        "api.py", "steps, or_published=True", "steps, or_published=False", "storage/test_storage_hub_merge.py"
    ),
    Mutation(
        "execute/reading.py",
        "if tile.op is self._op:",
        "if self._op is not None and tile.op.index == self._op.index:",
        JOINT,
    ),
    Mutation("execute/segment.py", "each.__traceback__ = None", "pass", JOINT),
    Mutation("merge_plan/jobs.py", "max(fixed.get(key, 0), each.op.need.fixed_bytes)", "0", JOINT),
    # What a search tries, keeps and tells
    Mutation("recipe_search/strategies.py", "score >= self._score", "score > self._score", SEARCH),
    Mutation("recipe_search/trials.py", "elif before[0] != text:", "elif False:", SEARCH),
    Mutation("recipe_search/job.py", "store.forget(range(len(cut)))", "pass", SEARCH),
    Mutation("recipe_search/job.py", "if first <= most:", "if True:", SEARCH),
    Mutation("stages/calibration/experts.py", "(weights * norms).sum()", "norms.sum()", CALIBRATION),
    Mutation(
        "stages/calibration/experts_alone.py",
        "tokens, given * weights[:, None])",
        "tokens, given)",
        CALIBRATION,
    ),
    Mutation(
        "stages/calibration/experts.py",
        "last = ranks[chosen.long()].amax(1)",
        "last = ranks[chosen.long()].amin(1)",
        CALIBRATION,
    ),
    Mutation(
        "stages/calibration/blocks.py", "total += unit.read(name)", "total = unit.read(name)", CALIBRATION
    ),
    Mutation(
        "planner/calibration.py",
        'report["model_digest"] != model_digest(model)',
        'report["model"] == ""',
        CALIBRATION,
    ),
    Mutation(
        "runtime/driver/chained_merges.py",
        "last = planned_as_measured(last, self._root)",
        "pass",
        CALIBRATION,
    ),
    Mutation("stages/texts.py", "tokens[: len(tokens) // step * step] or tokens", "tokens", LOSS),
    # What is pushed, and for whom to see
    Mutation("publish/hub_push.py", "private=not target.is_public", "private=target.is_public", PUSH),
    Mutation("publish/hub_push.py", 'startswith((f"{RECORD_DIRECTORY}/", "."))', 'startswith(".")', PUSH),
    Mutation("publish/hub_push.py", "verify_structure(root).require()", "verify_structure(root)", PUSH),
    Mutation("publish/hub_push.py", "elif plan not in (None, planned):", "elif False:", PUSH),
    # Fisher information
    Mutation("stages/calibration/backward.py", "if is_tied and weight is not None:", "if False:", FISHER),
    Mutation(
        "stages/calibration/backward.py", "sums.add_(gradient.square())", "sums.add_(gradient.abs())", FISHER
    ),
    Mutation(
        "planner/outputs/ops.py",
        "not method.random and method.statistics is None",
        "not method.random",
        FISHER,
    ),
    Mutation("planner/inputs/sources.py", "if stage.made_at:", "if False:", FISHER),
    Mutation(
        "methods/fisher.py",
        "torch.sub(total, total, out=share)",
        "share.zero_()",
        "methods/test_methods_fisher.py",
    ),
    # RegMean
    Mutation(
        "stages/calibration/regmean.py",
        "turned.T.float().contiguous()",
        "turned.float().contiguous()",
        REGMEAN,
    ),
    Mutation("stages/calibration/regmean.py", "own.diagonal().add_(least)", "own.diagonal()", REGMEAN),
    Mutation("stages/calibration/inputs.py", "if others & members:", "if not others & members:", REGMEAN),
    Mutation(
        "execute/compute.py",
        "left[offset : offset + len(own)] = own",
        "left[: len(own)] = own",
        "execute/test_execute_gathered.py",
    ),
    Mutation(
        "planner/regmean.py", "Product(None, by, columns, 1.0)", "Product(None, by, columns, -1.0)", REGMEAN
    ),
    # Routers that are repaired
    Mutation(
        "stages/calibration/router_solver.py",
        "if self._competes else answers",
        "if self._competes else 0 * answers",
        _REPAIR,
    ),
    Mutation("stages/calibration/router_solver.py", "* (1.0 - self._gamma)", "* self._gamma", _REPAIR),
    Mutation(
        "stages/calibration/router_solver.py", "alpha=self._gamma / self._count", "alpha=self._gamma", _REPAIR
    ),
    Mutation(
        "stages/calibration/router_repair.py",
        "            module.get_parameter(name).copy_(rounded)",
        "            module.get_parameter(name)",
        _REPAIR,
    ),
    Mutation(
        "stages/calibration/router_repair.py",
        "value=1.0) for each in every] if router.bias",
        "value=0.0) for each in every] if router.bias",
        _REPAIR,
    ),
)
