"""Each setting does what it says where the layers are split: over devices of this process, or with some in a daemon."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

from luce.config.settings import FIELDS
from tests.support import option_checks_drafts, option_checks_layers, option_checks_server

ROOT = Path(__file__).parents[2]
TABLES = option_checks_layers.CHECKS, option_checks_drafts.CHECKS, option_checks_server.CHECKS
CHECKS = {name: check for table in TABLES for name, check in table.items()}

#: settings whose behaviour another file tests: on a split, or where a split cannot be seen (GPUs, the end of a server)
ELSEWHERE = {
    "shard_env": "tests/process/test_shard_crash.py::test_variables_of_a_daemon",
    "optimize": "tests/unit/test_assembly_placement.py::test_a_slow_device_is_left_out",
    "pin_devices": "tests/unit/test_assembly_placement.py::test_pinned_devices_all_hold_layers",
    "optimize_prompt": "tests/unit/test_assembly_placement.py::test_the_prediction_is_for_the_load_of_the_settings",
    "optimize_reply": "tests/unit/test_assembly_placement.py::test_the_prediction_is_for_the_load_of_the_settings",
    "device_margin": "tests/unit/test_assembly_placement.py::test_margins_are_left_free",
    "measure_budget": "tests/unit/test_assembly_placement.py::test_layers_go_by_free_memory_where_nothing_is_measured",
    "prompt_weights": "tests/golden/test_split_gpu.py::test_unpacked_weights_change_no_bits",
    "prompt_precision": "tests/golden/test_prompt_precision.py::test_prompts_on_a_split_have_the_bits_of_one_device",
    "think_max_tokens": "tests/http/test_reasoning_budgets.py::test_settings_of_the_server",
    "hard_limit_reply_budget": "tests/http/test_reasoning_budgets.py::test_settings_of_the_server",
    "effort": "tests/http/test_reasoning_budgets.py::test_settings_of_the_server",
    "reasoning": "tests/http/test_reasoning.py::test_the_server_may_decide_where_nothing_is_asked",
    "warmup": "tests/unit/test_cli_serve.py::test_a_model_warms_up_before_it_is_ready",
    "tool_grammar": "tests/http/test_tool_grammar.py::test_a_strict_tool_is_held_from_its_trigger_on",
    "grammar_seconds": "tests/http/test_structured_output_load.py::"
    "test_a_schema_that_takes_too_long_is_refused_and_those_behind_it_are_told",
    "tools_none": "tests/http/test_tool_calls.py::test_tools_that_may_not_be_called_are_hidden_or_kept",
    "json_spacing": "tests/unit/test_text_grammar_options.py::"
    "test_compact_json_is_that_of_json_dumps_and_more_of_it_is_forced",
    "schema_max_kib": "tests/unit/test_text_grammar_options.py::test_schemas_and_tools_have_the_limits_of_the_settings",
    "tools_max_kib": "tests/unit/test_text_grammar_options.py::test_schemas_and_tools_have_the_limits_of_the_settings",
    "reasoning_format": "tests/http/test_reasoning_format.py::test_a_setting_or_a_field_says_where_reasoning_is",
    "reasoning_details": "tests/http/test_reasoning_format.py::test_details_are_added_where_a_setting_asks_for_them",
    "model_cards": "tests/unit/test_models_model_card.py::test_a_model_has_the_values_of_its_card",
    "metrics_compat": "tests/http/test_llamacpp_metrics.py::test_a_setting_adds_the_names",
    "compat": "tests/http/test_reasoning_format.py::test_a_named_function_ends_as_openai_has_it",
    "strict_schemas": "tests/http/test_structured_output_load.py::test_details_say_what_was_left_out",
    "models_dir": "tests/process/test_several_models.py::test_a_directory_of_models",
    "max_loaded_models": "tests/unit/test_server_model_pool.py::test_the_least_recently_used_makes_room",
    "load_wait": "tests/http/test_several_models.py::test_a_load_takes_too_long",
    "otlp_traces_endpoint": "tests/http/test_traces.py::test_a_receiver_gets_the_spans_at_the_latest_at_the_end",
    "idle_exit": "tests/process/test_serve.py::test_an_idle_server_ends",
    "drain_seconds": "tests/process/test_serve.py::test_requests_beyond_the_drain_time_end_with_their_text",
    "prefill_compression": "tests/http/test_prompt_compression.py::test_which_requests_are_compressed",
    "prefill_drafter": "tests/golden/test_compression.py::test_replies_are_the_same",
    "prefill_drafter_device": "tests/unit/test_compress_open.py::test_its_device",
    "prefill_threshold": "tests/http/test_prompt_compression.py::test_the_threshold",
    "prefill_keep_ratio": "tests/golden/test_compression.py::test_numbers_come_back_at_all_depths",
    "prefill_alpha": "tests/unit/test_compress_open.py::test_the_alpha_of_the_settings",
    "prefill_layers": "tests/unit/test_compress_open.py::test_the_layers_of_the_settings",
    "prefill_scored_layers": "tests/unit/test_compress_open.py::test_the_layers_of_the_settings",
    "prefill_keep": "tests/unit/test_compress_compressor.py::test_a_share_of_the_scores_decides",
    "prefill_freeze": "tests/http/test_prompt_compression.py::"
    "test_older_messages_of_a_conversation_are_compressed_once",
    "prefill_freeze_threshold": "tests/unit/test_text_protected.py::"
    "test_older_messages_are_all_but_the_first_the_last_and_the_short_ones",
    "prefill_positions": "tests/golden/test_compression.py::test_kept_tokens_with_their_original_positions",
    "prefill_curve": "tests/unit/test_compress_compression_options.py::test_a_curve_is_linear_between_its_points",
    "cluster": "tests/process/test_cluster.py::test_a_machine_joins_and_holds_layers",
    "cluster_announce": "tests/unit/test_cluster_discovery.py::test_a_host_joins_with_a_token_without_addresses",
    "cluster_drain": "tests/unit/test_cli_served_cluster_moves.py::test_a_member_leaves_once_the_model_does_without_it",
    "cluster_listen": "tests/process/test_cluster.py::test_a_machine_joins_and_holds_layers",
    "cluster_min": "tests/unit/test_cli_served_cluster.py::test_the_load_waits_for_members",
    "cluster_on_loss": "tests/unit/test_cli_served_cluster_moves.py::"
    "test_a_model_that_fits_nowhere_says_what_is_missing_until_that_is_back",
    "cluster_on_loss_context": "tests/unit/test_cli_served_cluster_moves.py::"
    "test_a_loss_may_cost_context_where_that_is_allowed",
    "cluster_replan": "tests/process/test_cluster_leaving.py::test_a_member_that_nobody_can_do_without_is_cut_off",
    "cluster_resume": "tests/unit/test_engine_recovery.py::test_a_shard_that_is_not_back_in_time_fails_its_replies",
    "cluster_stream": "tests/unit/test_cli_served_cluster.py::test_how_weights_are_sent_is_set",
    "cluster_stream_rate": "tests/unit/test_cli_served_cluster.py::test_how_weights_are_sent_is_set",
    "cluster_wait": "tests/unit/test_cli_served_cluster.py::test_the_wait_for_members_ends",
    "shard_key_file": "tests/process/test_shard_network.py::test_another_key",
}


def test_every_setting_has_a_check() -> None:
    assert sum(map(len, TABLES)) == len(CHECKS)
    assert not CHECKS.keys() & ELSEWHERE.keys()
    assert CHECKS.keys() | ELSEWHERE.keys() == FIELDS.keys()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_check_of_another_file_exists(name: str) -> None:
    file, _, function = ELSEWHERE[name].partition("::")
    names = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
    assert function in names


@pytest.mark.parametrize("name", CHECKS)
def test_option_propagation(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("luce")
    level = logger.level
    try:
        CHECKS[name](monkeypatch, tmp_path, caplog)
    finally:
        logger.setLevel(level)
