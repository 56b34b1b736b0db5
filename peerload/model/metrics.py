"""Metrics: the names of all counters, gauges and histograms of an agent, as `stats` lists them.

A constant for each, made with its help text in /metrics; docs/metrics.md lists them by subject. Counters end
in ``_total``. A metric that is kept by reason, type, state or rule has these as a label: see `labelled`. Label values are
identifiers, such as ``queue_full``.
"""

from __future__ import annotations

help_texts: dict[str, str] = {}


def _metric(name: str, says: str) -> str:
    help_texts[name] = says
    return name


def labelled(name: str, **labels: str) -> str:
    """The counter of one label value: ``peer_frames_dropped_total{reason="malformed"}``."""
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{inside}}}"


def label_text(reason: str) -> str:
    """The words of a label value for people: ``frame_too_large`` → `frame too large`."""
    return reason.replace("_", " ")


# Notifications

HOOKS = _metric(
    "hooks_total",
    "Notifications of the node's hooks; by `outcome`: delivered, failed, or dropped since too many waited.",
)

# Requests and clients

CONTROL_FRAMES_REFUSED = _metric(
    "control_frames_refused_total", "Frames of local clients that are malformed, too large, or incomplete."
)
FORWARDS_REFUSED = _metric(
    "forwards_refused_total", "Requests of other nodes' clients that were refused before they were read."
)
OUTPUT_COPIES_FAILED = _metric(
    "output_copy_failures_total", "Reads of output that could not fetch the rest from the node that runs the task."
)
INBOX_DROPPED = _metric("inbox_events_dropped_total", "Samples, gossip and advice dropped because the inbox was full.")
COMMITS_STALLED = _metric("commits_stalled", "1 while commits wait for room on the disk, else 0.")
ENDS_WAITING = _metric(
    "ends_waiting", "Ended attempts that are not reported yet, since the agent is short of descriptors or memory."
)
OUTPUTS_WAITING = _metric("outputs_waiting", "Ended attempts whose output files wait for room on a disk of this node.")
REQUESTS_REFUSED = _metric("requests_refused_total", "Requests that were answered with an error; by `code`.")

# Execution on this node

SPAWNS_DROPPED = _metric("spawns_dropped_total", "Starts that were not ordered, since the attempt was ended meanwhile.")
OUTPUTS_UNREADABLE = _metric(
    "outputs_unreadable_total", "Outputs whose files are gone or cannot be read at the end of the task."
)
FILES_FETCHED_BYTES = _metric("files_fetched_bytes_total", "Bytes of tasks' files that came from other nodes.")
FILES_SERVED_BYTES = _metric("files_served_bytes_total", "Bytes of tasks' files that other nodes have fetched here.")
FILES_WRONG = _metric(
    "files_wrong_total", "Blocks of files from other nodes that had another content than their name says."
)
OFFERS_UNANSWERED = _metric(
    "offers_unanswered_total", "Offers that were dropped, since their directory or user could not be checked in time."
)
OFFERS_OF_KEPT_OUTPUT = _metric("offers_of_kept_output_total", "Offers of an attempt whose output is here already.")
DIRECTORY_ANSWERS_UNASKED = _metric(
    "directory_answers_unasked_total", "Answers about directories that nobody had asked for."
)

# Peer links

PEER_MESSAGES_SENT = _metric("peer_messages_sent_total", "Messages sent over peer links.")
PEER_MESSAGES_RECEIVED = _metric("peer_messages_received_total", "Messages received over peer links.")
PEER_FRAMES_DROPPED = _metric(
    "peer_frames_dropped_total", "Frames and connections of peers that were dropped; by `reason`."
)
PEER_MESSAGES_REFUSED = _metric(
    "peer_messages_refused_total", "Messages that could not be queued for a peer; by `reason`."
)
PEER_SENDS_FAILED = _metric("peer_sends_failed_total", "Messages that came back unsent to the core.")
PEER_SEND_ERRORS = _metric("peer_send_errors_total", "Messages that could not be delivered to a peer.")
PEER_UNREACHABLE = _metric("peer_unreachable_total", "Times a peer could not be reached.")
PEER_LINKS_OPENED = _metric("peer_links_opened_total", "Links to peers that were opened.")
PEER_LINKS_IDLE_CLOSED = _metric("peer_links_idle_closed_total", "Links that were closed because they were idle.")
PEER_LINKS_EXPIRED = _metric("peer_links_expired_total", "Links that were closed because a certificate had expired.")
PEER_LINKS_DIALED_BACK = _metric(
    "peer_links_dialed_back_total", "Links that this node opened because a peer could not."
)
PEER_STREAMS_REQUESTED = _metric(
    "peer_streams_requested_total", "Streams that a peer was asked to open, since it cannot be dialled."
)
PEER_STREAMS_REFUSED = _metric("peer_streams_refused_total", "Requests to open a stream that were refused.")
PEER_UNREACHABLE_NOTICES = _metric(
    "peer_unreachable_notices_total", "Peers that were told that they cannot be dialled."
)
PEER_NAME_CLASHES = _metric("peer_name_clashes_total", "Agents that were refused because another has their name.")
PEER_BANS = _metric("peer_bans_total", "Peers that were banned for malformed frames.")
ADVICE_OVER_PEER_LINK = _metric(
    "advice_over_peer_link_total",
    "Advice that was sent over a peer link: no broker carried it, or the link carried tasks.",
)

# Gossip

GOSSIP_DATAGRAMS_SENT = _metric("gossip_datagrams_sent_total", "Datagrams sent.")
GOSSIP_BYTES_SENT = _metric("gossip_sent_bytes_total", "Bytes of datagrams sent.")
GOSSIP_DATAGRAMS_RECEIVED = _metric("gossip_datagrams_received_total", "Datagrams received.")
GOSSIP_BYTES_RECEIVED = _metric("gossip_received_bytes_total", "Bytes of datagrams received.")
GOSSIP_DATAGRAMS_UNSENT = _metric("gossip_datagrams_unsent_total", "Datagrams that were not sent; by `reason`.")
GOSSIP_DATAGRAMS_DROPPED = _metric("gossip_datagrams_dropped_total", "Datagrams that were dropped; by `reason`.")
GOSSIP_SEND_ERRORS = _metric("gossip_send_errors_total", "Errors of the socket while sending.")
GOSSIP_RECEIVE_ERRORS = _metric("gossip_receive_errors_total", "Errors of the socket while receiving.")
GOSSIP_MESSAGES_UNKNOWN = _metric(
    "gossip_messages_unknown_total", "Messages in datagrams that this version does not know."
)
GOSSIP_NAMES_UNRESOLVED = _metric("gossip_names_unresolved_total", "Host names that could not be resolved.")

# MQTT

MQTT_CONNECTS = _metric("mqtt_connects_total", "Connections to a broker.")
MQTT_MESSAGES_PUBLISHED = _metric("mqtt_messages_published_total", "Messages published; by `type`.")
MQTT_MESSAGES_RECEIVED = _metric("mqtt_messages_received_total", "Messages received; by `type`.")
MQTT_MESSAGES_DROPPED = _metric("mqtt_messages_dropped_total", "Messages that were dropped; by `reason`.")
MQTT_MESSAGES_REFUSED = _metric("mqtt_messages_refused_total", "Messages that were not published; by `reason`.")
MQTT_PUBLISHERS_MUTED = _metric(
    "mqtt_publishers_muted_total", "Publishers that were ignored for a while because they flood."
)

# Security

SECURITY_EVENTS = _metric("security_events_total", "Security events; by `rule` of security.md.")
STATEMENTS_UNSIGNED = _metric("statements_unsigned_total", "Statements whose signature is not the cluster's.")
CERTIFICATES_ISSUED = _metric("certificates_issued_total", "Certificates that were issued to other nodes.")
CERTIFICATES_REFUSED = _metric("certificates_refused_total", "Requests for a certificate that were refused.")
CERTIFICATES_REJECTED = _metric("certificates_rejected_total", "Certificates from an issuer that were not usable.")
CERTIFICATE_ISSUER_MISSING = _metric("certificate_issuer_missing_total", "Renewals that found no issuer to ask.")
JOINS_ACCEPTED = _metric("joins_accepted_total", "Machines that were let in.")
JOINS_REFUSED = _metric("joins_refused_total", "Machines that were refused.")
JOIN_CONNECTIONS_DROPPED = _metric(
    "join_connections_dropped_total", "Connections of newcomers that were dropped; by `reason`."
)

# Tasks

TASKS_SUBMITTED = _metric("tasks_submitted_total", "Tasks that were submitted here.")
TASKS_STARTED = _metric("tasks_started_total", "Starts of tasks of this home; by `place`: here, elsewhere.")
TASKS_ENDED = _metric("tasks_ended_total", "Ends of tasks of this home; by `outcome`.")
TASK_WAIT = _metric("task_wait_seconds", "Time from the submission of a task of this home to each start.")
TASK_RESPONSE = _metric("task_response_seconds", "Time from the submission of a task of this home to its end.")
TASKS = _metric("tasks", "Unfinished tasks of this home; by `state`.")
QUEUE_LENGTH = _metric("queue_tasks", "Tasks that wait for room on this node.")
QUEUE_OLDEST_WAIT = _metric("queue_oldest_wait_seconds", "Time since the first task in line arrived here.")
EXECUTIONS = _metric("executions_running", "Attempts that run on this node; by `home`: this, other.")
GUESTS = _metric("guest_tasks", "Attempts of other homes on this node, in any phase.")
TASKS_RETURNED = _metric("tasks_returned_total", "Tasks that came back from other nodes to wait at home.")
TASKS_CANCELLED_WITH_CLIENT = _metric(
    "tasks_cancelled_with_client_total", "Tasks that were cancelled because their client had gone."
)
ATTEMPTS_LOST = _metric("attempts_lost_total", "Attempts whose end is not known.")
ATTEMPTS_RETRIED = _metric("attempts_retried_total", "Attempts that failed and were repeated (`--retries`).")
ATTEMPTS_OUT_OF_GPU_MEMORY = _metric(
    "attempts_out_of_gpu_memory_total", "Attempts that failed for want of GPU memory and were repeated."
)
ATTEMPTS_LOST_WITH_DEVICE = _metric("attempts_lost_with_device_total", "Attempts that ended because a device failed.")
ATTEMPTS_NEVER_STARTED = _metric(
    "attempts_never_started_total", "Attempts of this node's own tasks that the launcher could not start."
)
ATTEMPTS_ON_WRONG_DEVICES = _metric(
    "attempts_on_wrong_devices_total", "Attempts that used devices that were not granted to them."
)
OUTCOMES_UNKNOWN = _metric("outcomes_unknown_total", "Tasks whose outcome became unknown (`--once`).")
UNAWAITED_TASK_STATUS = _metric(
    "unawaited_task_status_total", "Status messages about tasks that no task here waits for."
)

# Handoff

OFFERS_SENT = _metric("offers_sent_total", "Offers of tasks to other nodes.")
OFFERS_DECLINED = _metric("offers_declined_total", "Offers that other nodes declined.")
OFFERS_DECLINED_HERE = _metric("offers_declined_here_total", "Offers that this node declined; by `code`.")
OFFERS_ACCEPTED_LATE = _metric("offers_accepted_late_total", "Acceptances that came after the offer had expired.")
DECLINES_WITHOUT_OFFER = _metric("declines_without_offer_total", "Declines of offers that this node had not made.")
PLACEMENTS = _metric(
    "placements_total",
    "Placements of tasks of this home; by `kind`: here, chosen (a migration), needed (no room at home), asked (by the other node).",
)
LEASES_FROZEN = _metric("leases_frozen_total", "Attempts that were frozen since their lease ran out.")
FROZEN_TASKS = _metric("frozen_tasks", "Attempts that are frozen now.")
TRANSFERS = _metric("transfers_total", "Tasks that were handed to another node.")
REMOTE_TASKS_COMMITTED = _metric("remote_tasks_committed_total", "Tasks of other nodes that were taken here.")
RESERVATIONS_EXPIRED = _metric("reservations_expired_total", "Reservations that expired without a commit.")
FROZEN_TASKS_EVICTED = _metric("frozen_tasks_evicted_total", "Frozen tasks that were ended to make room.")
RESULTS_UNRECORDED = _metric(
    "results_unrecorded_total", "Results that were not recorded, since the attempt is not current."
)
RESULTS_OF_UNGRANTED_ATTEMPTS = _metric(
    "results_of_ungranted_attempts_total", "Results of attempts that this home did not grant."
)
OUTPUT_FETCHES_FAILED = _metric("output_fetch_failures_total", "Outputs that could not be fetched from their executor.")
MESSAGES_FROM_NON_EXECUTOR = _metric(
    "messages_from_non_executor_total", "Messages about a task from a node that does not have it."
)
MESSAGES_FROM_NON_HOME = _metric(
    "messages_from_non_home_total", "Messages about a task from a node that is not its home."
)
MESSAGES_UNAUTHORIZED = _metric("messages_unauthorized_total", "Messages whose sender may not send them; by `type`.")
RENEWALS_FROM_NON_EXECUTOR = _metric(
    "renewals_from_non_executor_total", "Lease renewals from a node that does not have the task."
)
RENEWALS_OF_CANCELLED = _metric("renewals_of_cancelled_total", "Lease renewals of attempts that were told to end.")
RENEWALS_BEFORE_PARKING = _metric(
    "renewals_before_parking_total", "Lease renewals that are older than the parking of the task."
)
PROMISES_OF_OTHER_STORE = _metric(
    "promises_of_other_store_total", "Messages that refer to another database of this node."
)
PEERS_WITH_OLDER_STORE = _metric("peers_with_older_store_total", "Peers that came back with an older database.")

# Load sharing

SENDER_SEARCHES = _metric("sender_searches_total", "Searches of a sender for a node with room.")
SENDER_PROBES = _metric("sender_probes_total", "Probes of senders.")
RECEIVER_SEARCHES = _metric("receiver_searches_total", "Searches of a receiver for work.")
RECEIVER_PROBES = _metric("receiver_probes_total", "Probes of receivers.")
PROBES_UNANSWERED = _metric("probes_unanswered_total", "Probes without an answer in time.")
TASKS_GIVEN = _metric("tasks_given_total", "Tasks that were given to a node that asked for work.")
TASKS_PASSED_ON = _metric("tasks_passed_on_total", "Tasks of other homes that were passed on to a third node.")
REQUESTS_BROADCAST = _metric("requests_broadcast_total", "Requests for bids to all nodes.")
REQUESTS_ANSWERED = _metric("requests_answered_total", "Requests for bids that this node answered.")
REQUESTS_UNANSWERED = _metric("requests_unanswered_total", "Requests for bids that this node did not answer.")
ANNOUNCEMENTS = _metric("announcements_total", "Announcements of load to all nodes.")
ANNOUNCEMENTS_TO_ONE = _metric("announcements_to_one_total", "Announcements of load to one node.")
PAIR_REQUESTS = _metric("pair_requests_total", "Requests to pair.")
PAIR_REQUESTS_REFUSED = _metric("pair_requests_refused_total", "Requests to pair that were refused.")
PAIRS_UNANSWERED = _metric("pairs_unanswered_total", "Requests to pair without an answer.")
FOOTPRINTS_LEFT = _metric("footprints_left_total", "Footprints that searches left at other nodes.")
POLICY_ERRORS = _metric("policy_errors_total", "Decisions of a policy that raised or were invalid.")
STATE_AGE = _metric("decision_state_age_seconds", "Age of the load reports that decisions about placement used.")

# Membership and the core

PEERS = _metric("peers", "Other nodes that are known; by `state`.")
PEER_LINKS = _metric("peer_links", "Open links to peers.")
MQTT_CONNECTED = _metric("mqtt_connected", "1 while a broker is connected, else 0; absent without MQTT.")
CERTIFICATE_EXPIRY = _metric(
    "certificate_expiry_timestamp_seconds", "Unix time at which this node's certificate expires."
)
PEERS_BECAME = _metric("peer_state_changes_total", "Changes of the state of a member; by `state`.")
PEERS_REFUSED = _metric("peers_refused_total", "Members that were not taken in, since there are too many.")
STATES_FORGED = _metric("states_forged_total", "Load reports in the name of another node.")
MESSAGES_UNKNOWN = _metric("messages_unknown_total", "Messages of a kind that this version does not know.")
SHORTAGES = _metric(
    "start_shortages_total", "Times this node could not start an attempt for want of processes, memory or disk."
)
STALLS = _metric("stalls_total", "Times the event loop of this agent stood still.")
GOSSIP_WITHOUT_ADDRESS = _metric(
    "gossip_without_address_total", "Gossip messages to a member whose address is not known."
)
GOSSIP_MESSAGES_QUEUED = _metric("gossip_messages_queued_total", "Gossip datagrams that the core has ordered.")
GOSSIP_OTHER_VERSION = _metric("gossip_other_version_total", "Gossip of another protocol version.")
GOSSIP_UNDER_OWN_NAME = _metric("gossip_under_own_name_total", "Gossip of another agent that has this node's name.")
GOSSIP_INCARNATIONS_TOO_GREAT = _metric(
    "gossip_incarnations_too_great_total", "Membership updates with an incarnation beyond the bound."
)
PROFILES_UNASKED = _metric("profiles_unasked_total", "Profiles that nobody had asked for.")
INDIRECT_PROBES = _metric(
    "indirect_probes_total", "Probes of members that went unanswered, so that others were asked to probe."
)
MEMBER_PROBES_FAILED = _metric("member_probes_failed_total", "Probes of members that failed, indirect ones included.")
MEMBERS_REFUSED = _metric("members_refused_total", "Members that were not taken in, since there are too many.")
VERDICTS_DEFERRED = _metric(
    "verdicts_deferred_total", "Members that were not called dead yet, since too many are suspected."
)
SUSPICIONS_REFUTED = _metric("suspicions_refuted_total", "Suspicions of this node that it refuted.")
INCARNATIONS_RAISED = _metric("incarnations_raised_total", "Times this node raised its incarnation.")
LOST_MEMBERS_TRIED = _metric("lost_members_tried_total", "Attempts to reach members that had been lost.")

# The agent and its machine

INFO = _metric("agent_info", "1, with node, version and policy as labels.")
STARTED_AT = _metric("agent_start_timestamp_seconds", "Unix time of the agent's start.")
AGENT_CPU = _metric("agent_cpu_seconds_total", "CPU time of the agent process.")
AGENT_MEMORY = _metric("agent_resident_memory_bytes", "Resident memory of the agent process.")
LAUNCHER_UP = _metric("launcher_up", "1 while the launcher answers.")
LOOP_LAG = _metric("event_loop_lag_seconds", "Lateness of the agent's timers.")
INBOX_EVENTS = _metric("inbox_events", "Events that wait for the consumer.")
COMMIT_TIME = _metric("commit_seconds", "Time of each commit of the store.")
DISK_FREE = _metric("disk_free_bytes", "Free space where the state directory is.")
DISK_SIZE = _metric("disk_size_bytes", "Size of the disk where the state directory is.")
SLOTS = _metric("slots", "Tasks that this node runs at a time.")
CPUS = _metric("cpus", "Cores of this node.")
CPUS_BUSY = _metric("cpus_busy", "Cores in use by anybody.")
MEMORY_SIZE = _metric("memory_size_bytes", "Memory of this node.")
MEMORY_USED = _metric("memory_used_bytes", "Memory in use by anybody.")
DRAINED = _metric("drained", "1 while this node takes no tasks.")
GPU_UTILIZATION = _metric("gpu_utilization_ratio", "Share of time at work; by `gpu`.")
GPU_MEMORY = _metric("gpu_memory_size_bytes", "Memory of a GPU; by `gpu`.")
GPU_MEMORY_USED = _metric("gpu_memory_used_bytes", "Memory in use; by `gpu` and `by`: tasks, others.")
GPU_TEMPERATURE = _metric("gpu_temperature_celsius", "Temperature; by `gpu`.")
GPU_POWER = _metric("gpu_power_watts", "Power; by `gpu`.")
POWER = _metric(
    "power_watts", "Power of the node, with its GPUs; by `source` and `quality`: measured, derived, estimated."
)
ENERGY = _metric(
    "energy_joules_total",
    "Energy of the node since the agent's start; by `of`: tasks, other (programs), idle; by `quality`.",
)
ENERGY_GAP = _metric("energy_gap_seconds_total", "Time since the agent's start whose energy is not known.")
GPU_TASKS = _metric("gpu_tasks", "Tasks on a GPU; by `gpu`.")
GPU_HEALTHY = _metric("gpu_healthy", "1 if a GPU is ok, 0 if it is degraded or sick; by `gpu`.")
