"""The map of `move.py`: which files move where, and which become one."""

PRODUCTS = (
    "gemv gemm_common:common gemm:small gemm_plan:plan gemm_table:table gemm_tune:tune "
    "skinny_gemm:skinny mma_gemv integer_gemv block_gemv eight_bit_gemm:eight_bit "
    "hopper_gemm hopper_gemm_kernel hopper_blocks hopper_blocks_kernel "
    "quantized_tiles"
)
EXPERTS = (
    "experts experts_integer:integer experts_integer_kernels:integer_kernels "
    "experts_mma:mma experts_mma_kernels:mma_kernels "
    "experts_route:route experts_tune:tune "
    "hopper_experts hopper_experts_kernel hopper_gated"
)
ATTENTION = (
    "attention attention_kernels:kernels attention_schedule:schedule attention_tiles:tiles "
    "hopper_attention:hopper hopper_attention_kernel:hopper_kernel "
    "hopper_attention_widen:hopper_widen kv8 latent latent_attention latent_kernels rope_store"
)
STEP = "step sampling sampling_kernels adjust drafts random blocks embedding"


def _room(room: str, names: str) -> dict[str, str]:
    moves = {}
    for entry in names.split():
        old, _, new = entry.partition(":")
        moves[f"ops/triton/{room}/{new or old}.py"] = f"ops/triton/{old}.py"
    return moves


SOURCE = {
    # What users hold, and the contract.
    "errors.py": "errors.py checks.py extras.py",
    "sampling_params.py": "token_rules.py sampling_checks.py sampling_params.py",
    "system.py": "child_process.py weight_files.py",
    "parallel/sharding.py": "sharding.py",
    # Text
    "text/__init__.py": "tokenization/__init__.py",
    "text/tokenizer.py": "engine/tokenizer_errors.py engine/tokenizer.py engine/text_length.py",
    "text/tokenizer_files.py": "tokenization/byte_level.py tokenization/formats.py tokenization/files.py",
    "text/sentencepiece.py": "tokenization/sentencepiece.py",
    "text/gguf_tokenizer.py": "models/gguf/tokenizer.py",
    "text/gguf_splitting.py": "models/gguf/splitting.py",
    "text/detokenizer.py": "engine/detokenizer.py",
    "text/chat_template.py": "engine/chat_template.py engine/template_files.py",
    "text/template_traits.py": "engine/template_traits.py",
    # Grammars
    "grammar/json_schema.py": "structured/json_schema.py",
    "grammar/patterns.py": "structured/patterns.py",
    "grammar/bounded.py": "structured/bounded.py",
    "grammar/disjoint.py": "structured/disjoint.py",
    "grammar/keywords.py": "structured/keywords.py",
    "grammar/grammar.py": "structured/grammar.py",
    "grammar/lark.py": "server/parsers/grammar.py",
    # The engine
    "engine/processes.py": "engine/owned_folders.py engine/threads.py engine/stuck.py",
    "engine/loop/core.py": "engine/core.py",
    "engine/loop/features.py": "engine/features.py",
    "engine/loop/telemetry.py": "engine/telemetry.py",
    "engine/loop/stats.py": "engine/stats.py engine/replica_stats.py",
    "engine/loop/trace.py": "engine/trace_files.py engine/trace.py",
    "engine/loop/snapshot.py": "engine/snapshot.py",
    "engine/loop/load.py": "engine/load.py",
    "engine/loop/output.py": "engine/output.py",
    "engine/loop/prompts.py": "engine/prompt_inputs.py engine/conversations.py engine/validate.py",
    "engine/loop/embedding.py": "engine/embedding_settings.py engine/embedding.py",
    "engine/loop/beam_search.py": "engine/beam_search.py",
    "engine/loop/messages.py": "engine/messages.py",
    "engine/loop/terminal.py": "engine/interrupts.py engine/request_bar.py",
    "engine/process/connection.py": "engine/framing.py engine/link.py engine/socket_server.py",
    "engine/process/host.py": "engine/host.py",
    "engine/process/streams.py": "engine/streams.py",
    "engine/process/completions.py": "engine/completion_table.py",
    "engine/process/process.py": "engine/process.py",
    "engine/process/remote_engine.py": "engine/remote_engine.py",
    "engine/process/replicas.py": "engine/replicas.py",
    "engine/process/placement.py": "engine/router.py",
    "engine/process/client.py": "engine/client.py",
    "engine/ranks/ranks.py": "engine/ranks.py",
    "engine/ranks/workers.py": "engine/rank_stats.py engine/workers.py",
    "engine/ranks/rank_watch.py": "engine/rank_watch.py",
    "engine/ranks/ray_actor.py": "engine/ray_actor.py",
    "engine/ranks/ray_placement.py": "engine/ray_placement.py",
    "engine/ranks/nodes.py": "engine/nodes.py",
    "engine/ranks/remote_worker.py": "engine/worker_messages.py engine/remote_worker.py",
    "engine/ranks/worker_process.py": "engine/worker_process.py",
    "engine/ranks/shared_memory.py": "engine/shared_memory.py",
    "engine/ranks/async_tp.py": "engine/async_tp.py",
    "engine/ranks/deterministic.py": "engine/deterministic.py",
    # Features
    "features/loop_feature.py": "loop_feature.py",
    "features/lora/peft.py": "adapters/background.py adapters/peft.py adapters/hub_adapters.py",
    "features/lora/registry.py": "adapters/registry.py adapters/slot_table.py",
    "features/expert_balance/stats.py": "balance/expert_stats.py",
    "features/kv_offload/stats.py": "offload/tier_stats.py",
    "features/kv_offload/tiers.py": "offload/jobs.py offload/group_tier.py",
    "features/disaggregation/stats.py": "disagg/disagg_stats.py",
    "features/disaggregation/layer_clock.py": "disagg/layer_batches.py disagg/layer_clock.py",
    "features/disaggregation/reader_link.py": "disagg/inbox.py disagg/reader_link.py",
    "features/disaggregation/prompt_fetches.py": "disagg/handover_time.py disagg/prompt_fetches.py",
    "features/speculation/stats.py": "speculation/source_stats.py",
    "features/speculation/settings.py": "speculation/draft_kinds.py speculation/settings.py",
    "features/speculation/draft_count.py": "speculation/step_times.py speculation/draft_count.py",
    "features/speculation/lookup.py": "speculation/lookup.py speculation/text_source.py",
    "features/structured_output/feature.py": "structured/claimed_drafts.py structured/feature.py",
    "features/structured_output/string_walk.py": "structured/string_places.py structured/string_walk.py",
    "features/samplers/hook.py": "samplers/distributions.py samplers/hook.py",
    "features/tuning/table_order.py": "tuning/table_order.py tuning/layer_shapes.py",
    "features/kv_events/feature.py": "kv_events/prefill_rate.py kv_events/feature.py",
    # The brain and the body
    "scheduler/waiting.py": "scheduler/policy.py scheduler/waiting.py",
    "scheduler/feature.py": "scheduler/feature.py scheduler/feature_set.py",
    "scheduler/fair_share.py": "scheduler/fair_share/__init__.py scheduler/fair_share/tenant.py scheduler/fair_share/interactive_burst.py scheduler/fair_share/fair_share.py",
    "runner/memory.py": "runner/gpu_memory.py runner/state_memory.py runner/memory.py",
    "runner/mask_ring.py": "runner/claim_ring.py runner/mask_ring.py",
    "runner/transfer/host.py": "runner/transfer/host.py runner/transfer/host_place.py",
    "runner/transfer/rank_moves.py": "runner/transfer/moves.py runner/transfer/rank_moves.py",
    "runner/transfer/ipc_agent.py": "runner/transfer/cuda_ipc.py runner/transfer/ipc_agent.py",
    "models/config.py": "models/registry.py models/config.py",
    "models/quantization.py": "models/quantized_checkpoint.py models/quantization.py",
    "models/families/rope.py": "models/families/rope_scaling.py models/families/rope.py",
    "layers/attention_variants.py": "layers/gated_attention.py layers/projection_norm.py layers/query_scale.py layers/value_norm.py",
    "layers/attention.py": "layers/sinks.py layers/attention.py",
    "layers/rotary.py": "layers/rope_spec.py layers/rope_scaling.py layers/rotary.py",
    "layers/residual.py": "layers/residual.py layers/later_sum.py",
    "quantization/quantization.py": "quantization/scheme.py quantization/quantization.py quantization/unquantized.py",
    "quantization/fields.py": "quantization/fields.py quantization/settings.py",
    "ops/reference/dense.py": "ops/reference/smooth.py ops/reference/dense.py",
    "ops/reference/attention.py": "ops/reference/sinks.py ops/reference/attention.py",
    "ops/reference/mask.py": "ops/reference/mask.py ops/reference/layer_clock.py",
    "ops/fixed/dense.py": "ops/fixed/dense.py ops/fixed/route.py",
    **_room("products", PRODUCTS),
    **_room("experts", EXPERTS),
    **_room("attention", ATTENTION),
    **_room("recurrent", "gated_delta_chunks gated_delta_net hopper_delta"),
    **_room("lora", "adapted_gemm adapter_tiles adapters"),
    **_room("collectives", "all_reduce sum_norm gather_columns segments"),
    **_room("step", STEP),
    # The server
    "server/http/bodies.py": "server/json_size.py server/request_body.py",
    "server/http/query.py": "server/query.py",
    "server/http/sse.py": "server/sse.py",
    "server/http/strict_model.py": "server/strict_model.py",
    "server/http/usage_report.py": "server/usage_report.py",
    "server/http/anthropic_errors.py": "server/anthropic/errors.py",
    "server/context/body_budget.py": "server/body_budget.py",
    "server/context/hints.py": "server/hints.py",
    "server/http/unknown_routes.py": "server/unknown_routes.py",
    "server/http/replica_proofs.py": "server/answer_tag.py server/key_proof.py",
    "server/context/api_keys.py": "server/middleware/api_keys.py",
    "server/context/rate_limits.py": "server/middleware/rate_limits.py",
    "server/context/request_context.py": "server/middleware/request_context.py",
    "server/context/request_trace.py": "server/telemetry/request_trace.py",
    "server/apis/admin/live.py": "server/telemetry/live.py",
    "server/store.py": "server/store.py",
    "server/chat/dialogue.py": "server/generation/dialogue.py server/generation/conversation.py",
    "server/parsers/chat_format.py": "server/generation/chat_format.py",
    "server/chat/generation.py": "server/generation/chat.py",
    "server/chat/text.py": "server/generation/usage.py server/generation/text.py server/generation/structured.py",
    "server/parsers/json_formats.py": "server/parsers/json_lists.py server/parsers/hermes.py server/parsers/llama3_json.py server/parsers/mistral.py",
    "server/apis/openai/structured.py": "server/openai/structural_tags.py server/openai/structured.py",
    "server/apis/openai/chunks.py": "server/openai/chunks.py",
    "server/apis/openai/chat.py": "server/openai/functions.py server/openai/chat.py",
    "server/apis/openai/completions.py": "server/openai/completions.py",
    "server/apis/batch/files.py": "server/openai/files.py",
    "server/apis/batch/batches.py": "server/openai/batches.py",
    "server/apis/batch/lines.py": "server/batch/lines.py server/batch/outcomes.py",
    "server/apis/scoring/embeddings.py": "server/openai/embeddings.py",
    "server/apis/scoring/scores.py": "server/openai/scores.py",
    "server/apis/scoring/vectors.py": "server/openai/vectors.py",
    "server/apis/admin/adapters.py": "server/openai/adapters.py",
    "server/apis/admin/management.py": "server/management.py",
    "server/apis/admin/kv_events.py": "server/kv_events.py",
    "server/apis/admin/peers.py": "server/peers.py",
    "server/telemetry/gpu_metrics.py": "nvml.py server/telemetry/gpu_metrics.py",
    "server/apis/anthropic/protocol.py": "server/anthropic/blocks.py server/anthropic/protocol.py",
    "server/apis/anthropic/events.py": "server/anthropic/objects.py server/anthropic/events.py",
    "server/apis/responses/items.py": "server/responses/items.py server/responses/objects.py",
    "server/apis/batch/store.py": "server/batch/objects.py server/batch/store.py",
    "server/http/context_middleware.py": "server/middleware/response_headers.py server/middleware/context_middleware.py",
    "server/process/uvicorn_server.py": "server/process/http_protocol.py server/process/uvicorn_server.py",
    "router/replica.py": "routing/replica_state.py routing/replica.py",
    "cli/help.py": "cli/options.py cli/help.py",
    "cli/chat.py": "cli/chat.py cli/generate.py",
    "tools/bench/record.py": "bench/record.py bench/outputs.py",
    "tools/bench/work.py": "bench/ceilings.py bench/work.py",
    "tools/bench/online/sweep.py": "bench/online/stats.py bench/online/sweep.py",
    "tools/quantize/rounding.py": "compression/layout.py compression/rounding.py",
    "tools/quantize/calibration.py": "compression/statistics.py compression/calibration.py",
    "tools/quantize/layer.py": "compression/forward.py compression/layer.py",
    "models/files.py": "models/files.py models/hub.py",
    "features/disaggregation/messages.py": "disagg/channel.py disagg/messages.py",
    "features/lora/adapted_linear.py": "adapters/adapted_linear.py",
    "runner/readback.py": "runner/upload.py runner/readback.py",
    "ops/triton/products/hopper_narrow.py": "ops/triton/hopper_narrow_kernel.py ops/triton/hopper_narrow.py",
    "ops/triton/products/round_inputs.py": "ops/triton/order_inputs.py ops/triton/round_inputs.py",
    "ops/triton/products/thread_words.py": "ops/triton/thread_words.py ops/triton/mma_unpack.py",
    "ops/triton/experts/kernels.py": "ops/triton/experts_kernels.py ops/triton/experts_gate.py",
    "ops/triton/experts/plan.py": "ops/triton/experts_plan.py ops/triton/experts_table.py",
    "ops/triton/attention/hopper_tiles.py": "ops/triton/hopper_attention_items.py ops/triton/hopper_attention_tiles.py",
    "ops/triton/step/host.py": "ops/triton/gate.py ops/triton/layer_clock.py ops/triton/mask.py",
    "ops/triton/products/table_file.py": "ops/triton/graph_time.py ops/triton/table_file.py",
    # The router
    "router/prompts.py": "routing/bodies.py routing/prompts.py",
    "router/telemetry.py": "routing/metrics.py routing/tracing.py",
    # Tools
    "tools/profile/profile.py": "bench/profile.py",
    "tools/profile/kernel_kinds.py": "bench/kernel_kinds.py",
    "tools/roofline/roofline.py": "bench/roofline.py",
    "tools/roofline/residual.py": "bench/residual.py",
    # Commands
    "cli/info.py": "cli/ranks.py cli/info.py",
    "cli/profile.py": "cli/profile.py cli/trace.py",
}

FOLDERS = [
    ("adapters/", "features/lora/"),
    ("balance/", "features/expert_balance/"),
    ("offload/", "features/kv_offload/"),
    ("disagg/", "features/disaggregation/"),
    ("speculation/", "features/speculation/"),
    ("structured/", "features/structured_output/"),
    ("samplers/", "features/samplers/"),
    ("pooling/", "features/pooling/"),
    ("kv_events/", "features/kv_events/"),
    ("tuning/", "features/tuning/"),
    ("tokenization/", "text/"),
    ("server/middleware/", "server/http/"),
    ("server/generation/", "server/chat/"),
    ("server/openai/", "server/apis/openai/"),
    ("server/responses/", "server/apis/responses/"),
    ("server/anthropic/", "server/apis/anthropic/"),
    ("server/batch/", "server/apis/batch/"),
    ("routing/", "router/"),
    ("bench/", "tools/bench/"),
    ("simulate/", "tools/simulate/"),
    ("verify/", "tools/verify/"),
    ("evaluate/", "tools/evaluate/"),
    ("compression/", "tools/quantize/"),
    ("ops/triton/gemm_tables/", "ops/triton/products/gemm_tables/"),
]

_UNIT = {
    "cache": "cache_manager cache_pool cache_tree continuation sorted_keys state_slots hybrid_prefixes",
    "scheduler": "scheduler scheduler_features scheduler_machine fair_share plan",
    "runner": "runner memory mask_ring claim_ring kv_transfer layer_reads peer_place ipc nixl_agent "
    "step_buckets verification second_program sampling",
    "models": "bounded_reads hostile_folders import_weight random_checkpoint expert_choices gated_heads",
    "parallel": "pipeline abort_group async_tp scaling",
    "text": "chat_template detokenizer template_equality template_traits tokenizer_formats",
    "engine": "engine_process beam_search completion_table config_sampling config_sources engine_client engine_host "
    "features_on_demand hybrid_engine kv8_engine loop_feature nodes owned_folders ranks ray "
    "replicas_loading router snapshot socket_server step_trace threads token_rules workers "
    "wrong_types",
    "features/disaggregation": "log_limit disagg_engines disagg_listener disagg_machine disagg_peers nixl_engines",
    "features/expert_balance": "balance",
    "features/kv_events": "kv_events",
    "features/kv_offload": "host_tier hybrid_tiers tiers",
    "features/samplers": "samplers",
    "features/speculation": "drafts speculation speculation_parts stage_drafts step_times",
    "features/tuning": "tuning",
    "server": "rate_limits",
    "cli": "cli doctor info terminal",
    "tools": "bench_cases bench_online bench_outputs bench_record bench_trace cache_bench gpu_meter "
    "calibration_text profile roofline scheduler_bench",
    "repository": "bench_report chart checks ci_stages deploy embedded_recipe fork_server "
    "import_circles ladder suite switches vs_sglang vs_vllm widen_model",
}

TESTS = {
    f"{folder}/test_{name}.py": f"unit/test_{name}.py"
    for folder, names in _UNIT.items()
    for name in names.split()
} | {
    "tiny_engine.py": "unit/tiny_engine.py",
    "local_stages.py": "unit/local_stages.py",
    "tools/test_perplexity.py": "models/test_perplexity.py",
    "tools/test_quantize.py": "models/test_quantize.py",
    "quantization/test_quantization.py": "models/test_quantization.py",
    "quantization/test_rounding.py": "models/test_rounding.py",
    "router/test_simulate.py": "routing/test_simulate.py",
}

TEST_FOLDERS = [
    ("unit/templates/", "text/templates/"),
    ("adapters/", "features/lora/"),
    ("structured/", "features/structured_output/"),
    ("routing/", "router/"),
    ("verify/", "tools/"),
]

ROOMS = [("src/quire/", SOURCE, FOLDERS), ("tests/", TESTS, TEST_FOLDERS)]

DOCS: dict[str, str] = {
    "system.py": "Files and processes of this machine: bounded reads of regular files, and children.",
    "server/http/replica_proofs.py": "What a server shows a router: that it has the key, and whose answer it is.",
    "features/lora/peft.py": "Adapters in PEFT's format, read in the background, and fetched from the hub.",
    "errors.py": "Typed errors, and checks of values that raise them.",
    "sampling_params.py": "Parameters of sampling, as users give them, and their checks.",
    "text/tokenizer.py": "Tokenization through the `tokenizers` library.",
    "engine/processes.py": "What each process of an engine needs: its folder and its threads.",
    "engine/loop/stats.py": "The statistics of an engine, and of several as those of one.",
    "engine/loop/trace.py": "Every step and request as Chrome trace events, in files of bounded size.",
    "engine/loop/prompts.py": "Prompts and parameters of callers: brought to one shape, and checked.",
    "engine/loop/terminal.py": "An engine in the caller's terminal: Ctrl-C, and the progress of its requests.",
    "engine/loop/embedding.py": "Embeddings: from a pooled hidden state to the user's vector.",
    "engine/process/connection.py": "The connection between a client and an engine's process.",
    "engine/ranks/workers.py": "The executor of several ranks, each in a process of its own.",
    "engine/ranks/remote_worker.py": "A further rank: its process, and the messages to it.",
    "features/kv_offload/tiers.py": "The blocks in the lower tiers, and transfers under way.",
    "runner/memory.py": "Sizes of the KV cache: how many blocks and states fit into memory.",
    "runner/mask_ring.py": "Masks and claims of steps in flight, shared with threads that build masks.",
    "layers/attention_variants.py": "Attention with one more step: a gate, norms, or scaled queries.",
    "layers/rotary.py": "Rotary positions: settings, extended frequencies, and the table of angles.",
    "quantization/quantization.py": "The interface of a weight format, and weights that are not quantized.",
    "quantization/fields.py": "The settings of a checkpoint's quantization, and their typed fields.",
    "scheduler/fair_share.py": "Fair sharing between tenants: deficit round-robin over their queues.",
    "server/chat/dialogue.py": "Requests, conversations and events that all chat-like routes share.",
    "server/chat/text.py": "Runs of a request's prompts, whose updates are handed on in batches.",
    "server/parsers/json_formats.py": "Tool calls written as JSON: Granite, Phi 4, Command, Apertus, Hermes, Llama 3, Mistral.",
    "router/telemetry.py": "The router's metrics and spans.",
    "cli/profile.py": "`quire profile` and `quire trace`: a workload, profiled or traced.",
}

REPLACED: dict[str, list[tuple[str, str]]] = {
    "tools/make_calibration_text.py": [
        ('SOURCE / "compression" /', 'SOURCE / "tools" / "quantize" /')
    ],
    "src/quire/compression/calibration.py": [
        ('resources.files("quire") / "compression" /', 'resources.files("quire.tools.quantize") /')
    ],
}

NEW: dict[str, str] = {
    "src/quire/grammar/__init__.py": '"""Grammars: JSON Schema, regular expressions and Lark, as llguidance compiles them."""\n',
    "src/quire/engine/loop/__init__.py": '"""The engine\'s loop, and what goes into it and comes out."""\n',
    "src/quire/engine/process/__init__.py": '"""The engine in a process of its own, and its clients."""\n',
    "src/quire/engine/ranks/__init__.py": '"""Several ranks: their processes, on this machine and others."""\n',
    "src/quire/features/__init__.py": '"""Features: each is a folder, and nothing outside names it."""\n',
    "src/quire/server/apis/__init__.py": '"""The APIs, one folder each."""\n',
    "src/quire/server/context/__init__.py": '"""Who asks, what they may, and how long: one HTTP request\'s context."""\n',
    "src/quire/server/apis/scoring/__init__.py": '"""Embeddings, scores and ranks of texts."""\n',
    "src/quire/server/apis/admin/__init__.py": '"""Routes for who runs the server."""\n',
    "src/quire/tools/__init__.py": '"""Tools around the engine: measuring, checking, predicting, quantizing."""\n',
    "src/quire/tools/profile/__init__.py": '"""Profiles of a workload by torch\'s profiler."""\n',
    "src/quire/tools/roofline/__init__.py": '"""Predicted times, and how far measurements are from them."""\n',
    **{
        f"src/quire/ops/triton/{room}/__init__.py": f'"""{doc}"""\n'
        for room, doc in {
            "products": "Products of tokens and weights, and what surrounds them.",
            "experts": "The feed-forward layers of experts.",
            "attention": "Attention over the paged cache.",
            "recurrent": "Gated delta nets.",
            "lora": "Low-rank adapters beside linear layers.",
            "collectives": "Sums and gathers over ranks.",
            "step": "The parts of a step around the model.",
        }.items()
    },
}

ORDER: dict[str, tuple[str, ...]] = {
    "text": ("src/quire/text/",),
    "grammar": ("src/quire/grammar/",),
    "features": ("src/quire/features/",),
    "engine": ("src/quire/engine/",),
    "body": tuple(
        f"src/quire/{name}/"
        for name in (
            "cache",
            "scheduler",
            "runner",
            "models",
            "layers",
            "quantization",
            "parallel",
            "ops/reference",
            "ops/fixed",
        )
    ),
    "kernels": ("src/quire/ops/triton/",),
    "server": ("src/quire/server/",),
    "router": ("src/quire/router/",),
    "tools": ("src/quire/tools/",),
    "cli": ("src/quire/cli/",),
    "top": ("src/quire/errors.py", "src/quire/sampling_params.py", "src/quire/system.py"),
    "tests": ("tests/",),
}
