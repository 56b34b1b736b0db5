"""The rules of docs/security.md, and the tests that are marked with their ids, `@pytest.mark.rule("J2")`."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
IDS = tuple(re.findall(r"^\| ([CFJLMPSTX]\d+) \| .* \| .*\|$", PAGE, re.MULTILINE))
"""The ids of the rules, in the order of the page."""
TESTS = {
    "J1": (
        "tests/integration/test_renewal.py::test_certificates_are_changed_under_tasks_and_none_is_lost_or_run_twice",
        "tests/unit/agent/test_tls.py::test_a_certificate_names_its_node_and_lasts_ninety_days",
        "tests/unit/agent/test_tls.py::test_it_is_made_anew_after_two_thirds_of_its_life_or_if_the_clock_was_set_back",
        "tests/integration/test_joining.py::test_a_member_without_the_cas_key_gets_a_new_certificate_in_time",
    ),
    "J2": (
        "tests/integration/test_join_door.py::test_whatever_is_wrong_with_a_token_the_answer_is_the_same",
        "tests/integration/test_join_door.py::test_somebody_in_between_with_a_ca_of_its_own_is_told_nothing",
        "tests/integration/test_join_door.py::test_a_thousand_guesses_are_ten_answers",
        "tests/unit/agent/test_invitations.py::test_it_is_good_once",
    ),
    "J3": (
        "tests/integration/test_peer_tls.py::test_who_does_not_speak_tls_gets_no_answer",
        "tests/integration/test_peer_tls.py::test_an_older_tls_is_refused",
        "tests/integration/test_peer_tls.py::test_a_certificate_that_will_not_do",
        "tests/integration/test_peer_tls.py::test_who_says_nothing_is_shut_out",
        "tests/integration/test_peer_tls.py::test_strangers_without_proof_are_bounded",
    ),
    "J4": (
        "tests/integration/test_joining.py::test_a_revocation_reaches_all_within_ten_seconds",
        "tests/integration/test_joining.py::test_the_tasks_of_who_is_revoked_end_on_every_node",
        "tests/unit/agent/test_trust.py::test_a_member_can_neither_forge_nor_change_nor_undo_one",
        "tests/integration/test_peer_link.py::test_who_is_shut_out_loses_every_link_and_stream_and_gets_no_other",
        "tests/unit/agent/test_invitations.py::test_who_is_revoked_cannot_use_its_invitation_again_nor_what_is_left_of_it",
    ),
    "J5": (
        "tests/integration/test_mqtt_agents.py::test_the_key_that_seals_is_changed_under_traffic_and_nothing_is_lost",
        "tests/unit/wire/test_seal.py::test_a_message_opens_once",
        "tests/unit/wire/test_seal.py::test_no_bit_of_it_can_be_changed_and_no_byte_cut_or_added",
        "tests/unit/agent/test_trust.py::test_two_keys_are_valid_for_a_while",
        "tests/integration/test_membership.py::test_datagrams_of_a_stranger_change_nothing",
    ),
    "J6": (
        "tests/integration/test_cluster_verb.py::test_without_a_directory_other_machines_are_refused_with_a_way_out",
        "tests/integration/test_bad_input.py::test_listening_to_the_world_is_refused_without_a_cluster_directory",
        "tests/unit/agent/test_cluster.py::test_no_two_are_alike",
    ),
    "L1": (
        "tests/security/test_access.py::test_who_asks_is_known_from_the_operating_system",
        "tests/security/test_access.py::test_the_socket_is_the_groups_and_admin_verbs_are_the_admins",
        "tests/security/test_doctor_security.py::test_another_user_is_refused_though_the_socket_is_open",
        "tests/security/test_doctor_security.py::test_a_socket_that_others_may_use",
        "tests/unit/agent/test_authorization.py::test_who_is_let_in",
        "tests/unit/agent/test_authorization.py::test_whose_a_task_is_comes_from_the_operating_system",
    ),
    "L2": (
        "tests/security/test_access.py::test_a_task_of_another_user_is_as_one_that_is_not_there",
        "tests/security/test_access.py::test_lists_and_events_tell_each_of_its_own",
        "tests/unit/agent/test_authorization.py::test_who_may_ask_what_of_a_system_agent",
        "tests/unit/agent/test_authorization.py::test_tasks_of_others_are_as_tasks_that_are_not_there",
    ),
    "L3": (
        "tests/integration/test_bad_input.py::test_a_frame_that_claims_4_gib",
        "tests/integration/test_bad_input.py::test_arguments_over_the_limit_are_refused",
        "tests/integration/test_bad_input.py::test_more_clients_than_there_is_room_for",
        "tests/integration/test_control_answers.py::test_one_client_may_leave_only_so_much_unanswered",
        "tests/unit/agent/test_quotas.py::test_what_is_waited_for_has_a_bound_of_each_user_and_of_each_node",
        "tests/unit/agent/test_connection.py::test_who_asks_and_does_not_read_is_not_listened_to_until_it_has_read",
        "tests/security/test_access.py::test_a_flood_of_one_user_does_not_stop_another",
    ),
    "L4": (
        "tests/security/test_access.py::test_a_flood_of_one_user_does_not_stop_another",
        "tests/unit/agent/test_quotas.py::test_what_one_user_has_too_much_of_is_no_others_loss",
        "tests/unit/agent/test_quotas.py::test_output_that_is_kept_keeps_more_from_being_queued",
    ),
    "X1": (
        "tests/security/test_system_users.py::test_the_map_and_what_it_may_not_name",
        "tests/security/test_system_users.py::test_no_two_guests_at_a_time_have_one_uid",
    ),
    "X2": (
        "tests/security/test_system_users.py::test_the_map_and_what_it_may_not_name",
        "tests/security/test_launcher_rights.py::test_a_program_that_was_not_chosen_is_not_run_by_whatever_name",
        "tests/unit/agent/test_authorization.py::test_who_takes_chosen_foreign_tasks_only_is_no_home_for_them_either",
    ),
    "X3": (
        "tests/security/test_escapes.py::test_the_attempt_fails",
        "tests/security/test_escapes.py::test_what_it_has_left_running_is_ended_with_it",
        "tests/security/test_escapes.py::test_nothing_of_its_files_stays",
        "tests/unit/test_deploy.py::test_the_agent_is_not_exposed",
    ),
    "X4": (
        "tests/integration/test_launcher_units.py::test_the_kind_is_told_with_what_it_cannot_hold",
        "tests/integration/test_memory_limits.py::test_how_memory_is_limited_is_told",
    ),
    "X5": (
        "tests/security/test_system_users.py::test_a_guest_has_a_uid_of_its_own_and_is_told_only_what_was_named",
        "tests/security/test_ids.py::test_nothing_of_the_agents_own_environment_is_in_a_tasks",
        "tests/unit/cli/test_options.py::test_environment_less_login_and_secrets",
        "tests/unit/cli/test_submit_run.py::test_submit_on_a_terminal_says_what_was_left_out",
    ),
    "X6": (
        "tests/security/test_system_users.py::test_a_task_runs_as_who_submitted_it_and_with_no_more",
        "tests/integration/test_launcher.py::test_its_socket_is_private_and_its_lock_held",
        "tests/integration/test_launcher.py::test_garbage_costs_the_connection_alone",
    ),
    "X7": (
        "tests/integration/test_agent_alone.py::test_a_task_has_no_descriptors_of_ours_and_reads_nothing",
        "tests/integration/test_launcher.py::test_it_leads_a_session_of_its_own_and_a_signal_reaches_its_whole_group",
        "tests/security/test_system_users.py::test_its_output_can_be_written_through_its_descriptors_and_not_read",
        "tests/security/test_system_users.py::test_nothing_of_agent_and_launcher_is_open_in_a_task",
    ),
    "F1": (
        "tests/unit/agent/test_spool_limits.py::test_whatever_a_task_puts_in_place_of_its_files_goes_or_stays_and_stops_nobody",
        "tests/integration/test_agent_output.py::test_a_pipe_in_the_place_of_the_output_stops_nobody",
    ),
    "F2": (
        "tests/integration/test_launcher_hard.py::test_output_is_bounded_while_it_is_written_and_again_after_the_task_has_emptied_it",
    ),
    "F3": (
        "tests/security/test_system_users.py::test_result_files_are_written_as_the_user_and_no_link_is_followed",
        "tests/unit/test_files.py::test_outputs_that_were_not_asked_for_are_not_placed",
    ),
    "T1": (
        "tests/unit/cli/test_text.py::test_nothing_harmful_is_left",
        "tests/integration/test_hostile_text.py::test_no_control_reaches_a_terminal",
        "tests/unit/cli/test_attach.py::test_the_output_of_another_users_task_is_made_harmless",
        "tests/integration/test_forward_lied_to.py::test_an_error_in_hostile_words_is_cut_and_escaped",
    ),
    "P1": (
        "tests/wire/test_peer_codec.py::test_sizes_are_bounded_before_anything_is_read",
        "tests/wire/test_peer_codec.py::test_arbitrary_bytes",
        "tests/integration/test_peer_link.py::test_three_malformed_frames_close_and_ban",
        "tests/integration/test_peer_link.py::test_a_frame_that_claims_4_gib_is_refused_before_it_comes",
        "tests/unit/agent/test_input_limits.py::test_one_byte_a_second_is_given_up_within_ten_seconds",
    ),
    "P2": (
        "tests/core/test_executor.py::test_so_many_offers_of_one_peer_are_outstanding_and_no_more",
        "tests/unit/agent/test_input_limits.py::test_who_sends_more_than_is_looked_at_is_not_read",
        "tests/integration/test_peer_link.py::test_messages_that_a_stalled_peer_does_not_take_come_back",
        "tests/integration/test_forward_lied_to.py::test_a_flood_of_large_requests_is_read_no_faster_than_carried_out",
        "tests/integration/test_forward_lied_to.py::test_who_asks_and_does_not_read_is_not_listened_to_until_it_has_read",
    ),
    "P3": (
        "tests/security/test_authorisation.py::test_the_table_has_every_kind_of_message_and_no_other",
        "tests/security/test_authorisation.py::test_what_only_a_home_may_say",
        "tests/security/test_authorisation.py::test_what_only_a_node_that_has_it_may_say",
        "tests/core/test_roles.py::test_who_may_tell_the_node_that_runs_it",
        "tests/core/test_roles.py::test_who_may_tell_its_home",
        "tests/integration/test_agent_lied_to.py::test_what_another_says_of_a_task_that_a_node_has",
        "tests/integration/test_peer_link.py::test_frames_in_anothers_name_close_the_link",
        "tests/security/test_authorisation.py::test_what_any_member_may_say_moves_nothing",
        "tests/unit/agent/test_authorization.py::test_who_is_who_from_another_node",
        "tests/security/test_access.py::test_users_of_another_node",
    ),
    "P4": (
        "tests/core/test_black_holes.py::test_who_says_that_it_takes_tasks_and_refuses_them_is_skipped_for_a_minute",
        "tests/core/test_black_holes.py::test_one_on_which_all_tasks_fail_at_once_is_skipped",
        "tests/core/test_roles.py::test_advice_moves_nothing_that_somebody_has",
    ),
    "P5": (
        "tests/integration/test_agent_fake_peer.py::test_a_commit_runs_once_however_often_it_is_said",
        "tests/integration/test_peer_link.py::test_a_frame_for_an_earlier_start_is_answered_and_ignored",
        "tests/unit/wire/test_seal.py::test_late_ones_open_within_the_window_and_no_later",
    ),
    "P6": (
        "tests/wire/test_peer_codec.py::test_unknown_fields_are_skipped",
        "tests/core/test_membership.py::test_a_datagram_of_other_versions_only_is_not_looked_at",
        "tests/integration/test_launcher_link_hard.py::test_a_launcher_of_another_version_is_of_use",
    ),
    "M1": (
        "tests/integration/test_mqtt_tls.py::test_a_node_writes_below_its_own_name_alone",
        "tests/integration/test_mqtt_tls.py::test_who_is_no_node_does_not_come_in",
        "tests/integration/test_mqtt_tls.py::test_there_is_no_falling_back_to_plain",
        "tests/integration/test_mqtt_agents.py::test_doctor_tries_whether_anybody_may_publish",
        "tests/integration/test_mqtt.py::test_nothing_can_be_read_on_the_way",
    ),
    "M2": (
        "tests/wire/test_nothing_commands.py::test_over_mqtt_advice_is_believed_and_nothing_else",
        "tests/wire/test_nothing_commands.py::test_by_datagram_nothing_is_started_ended_or_moved",
        "tests/integration/test_mqtt.py::test_ownership_is_never_published",
        "tests/integration/test_mqtt.py::test_what_a_hostile_broker_hands_over_is_dropped_and_counted",
        "tests/core/test_roles.py::test_advice_moves_nothing_that_somebody_has",
    ),
    "C1": (
        "tests/security/test_lint.py::test_each_of_them_is_found",
        "tests/security/test_lint.py::test_it_is_let_pass_where_functions_travel_and_nowhere_else",
        "tests/security/test_lint.py::test_launcher_and_agent_start_isolated",
    ),
    "S2": (
        "tests/integration/test_mqtt_agents.py::test_agents_with_peers_and_a_broker_listen_at_one_address_each",
        "tests/integration/test_two_machines.py::test_an_agent_listens_at_its_socket_and_one_address_alone",
        "tests/security/test_system_users.py::test_agent_and_launcher_listen_at_a_socket_each_and_one_address_alone",
    ),
    "S4": ("tests/security/test_system_users.py::test_a_task_runs_as_who_submitted_it_and_with_no_more",),
    "S5": (
        "tests/security/test_system_users.py::test_result_files_are_written_as_the_user_and_no_link_is_followed",
        "tests/security/test_system_users.py::test_a_directory_is_looked_at_as_its_user",
    ),
    "S6": (
        "tests/security/test_system_users.py::test_a_user_whose_name_is_a_number_is_that_user",
        "tests/security/test_system_users.py::test_a_task_runs_as_who_submitted_it_and_with_no_more",
    ),
    "S10": (
        "tests/unit/agent/test_tls.py::test_only_tls_1_3_both_ends_and_no_tickets",
        "tests/integration/test_peer_tls.py::test_a_plaintext_introduction_is_not_read",
        "tests/integration/test_peer_tls.py::test_a_member_that_speaks_another_protocol",
    ),
    "S11": (
        "tests/integration/test_bad_input.py::test_a_state_directory_that_anybody_may_write_to",
        "tests/unit/agent/test_cluster.py::test_others_may_not_look_into_it",
        "tests/unit/agent/test_cluster.py::test_a_part_that_is_a_link",
        "tests/unit/agent/test_store_damage.py::test_the_files_are_private",
    ),
    "S13": (
        "tests/integration/test_cluster_verb.py::test_no_key_is_told_logged_or_recorded",
        "tests/unit/agent/test_trust.py::test_no_key_is_shown",
        "tests/integration/test_mqtt.py::test_an_unusable_address_is_refused_without_its_password",
        "tests/unit/agent/test_mqtt_address.py::test_a_file_that_is_not_used_is_not_shown",
        "tests/unit/agent/test_mqtt_address.py::test_no_password_on_a_command_line",
    ),
    "S15": (
        "tests/security/test_code.py::test_nothing_is_fetched_from_a_url",
        "tests/integration/test_bad_input.py::test_a_node_name_that_cannot_be_used",
    ),
    "S16": (
        "tests/integration/test_peer_tls.py::test_a_certificate_for_another_node",
        "tests/unit/agent/test_tls.py::test_another_cas_certificate_is_none_of_ours",
        "tests/unit/agent/test_broker_files.py::test_a_brokers_certificate_is_no_nodes",
    ),
    "S17": ("tests/security/test_ids.py::test_an_id_is_found_by_all_of_it_alone",),
    "S18": ("tests/wire/test_peer_codec.py::test_sizes_are_bounded_before_anything_is_read",),
    "S20": ("tests/security/test_lint.py::test_each_of_them_is_found",),
}
"""Rule id → the tests that hold it."""


@cache
def marked() -> dict[str, list[str]]:
    """Rule id → the tests that hold it, `tests/…/test_x.py::test_y`, by the markers of functions, classes and files."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.rule" not in text:
            continue
        tree = ast.parse(text)
        of_file = [rule for node in tree.body if _is_pytestmark(node) for rule in _rules(node)]
        name = path.relative_to(ROOT).as_posix()
        for node in tree.body:
            of_class = [rule for decorator in getattr(node, "decorator_list", []) for rule in _rules(decorator)]
            parts = node.body if isinstance(node, ast.ClassDef) else [node]
            for part in parts:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name.startswith("test_"):
                    own = [rule for decorator in part.decorator_list for rule in _rules(decorator)]
                    within = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
                    for rule in dict.fromkeys([*of_file, *of_class, *own]):
                        found.setdefault(rule, []).append(f"{name}::{within}{part.name}")
    return found


def _is_pytestmark(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in targets)


def _rules(node: ast.AST) -> list[str]:
    """The ids in `mark.rule(…)` anywhere within, such as in a list of marks or of a parameter's."""
    return [
        str(word.value)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "rule"
        for word in call.args
        if isinstance(word, ast.Constant)
    ]
