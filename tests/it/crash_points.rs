//! A SIGKILL, an error or a panic at every fault point, on both stores: the table says what is right there.
//!
//! Each row is a world of its own: an API, a sink, a database, and a gateway that meets the fault. Then, where it died,
//! the next process on the same store; and what counts is asked of all of them: how often the API executed, what the
//! record says, whether its events were written with it and delivered under one id, and what a retry of the key gets.

#![expect(clippy::wildcard_enum_match_arm, reason = "most ways need nothing of their own")]

use std::collections::{BTreeSet, HashMap};
use std::fmt::Debug;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::time::Duration;

use http::Response;
use http_body_util::Full;
use oncegate::fault::Point;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::support::client::Answer;
use crate::support::fleet::{self, ONE_EVENT, TWO_EVENTS, command, listed, order};
use crate::support::orders::{Orders, created};
use crate::support::process::{self, Gateway, PATIENCE};
use crate::support::rig::{self, Place, Which, on_both_stores};
use crate::support::sink::{Act, OK, Sink};

on_both_stores! {
    a_first_request_that_dies_on_its_way_is_neither_repeated_nor_forgotten,
    a_later_step_that_dies_is_neither_repeated_nor_forgotten,
    an_owed_end_that_dies_with_its_process_is_found_again,
    an_error_of_the_store_is_no_guess,
    a_task_that_panics_frees_only_what_was_not_sent,
    what_works_in_the_background_may_die_at_any_step,
    an_event_is_delivered_whatever_the_relay_dies_of,
    a_command_that_dies_has_done_all_or_nothing,
    a_migration_that_dies_is_done_again,
    a_row_of_this_process_that_nobody_works_on_is_unknown,
    a05a_killed_before_it_connects_the_record_is_unknown_and_stays_unexecuted,
    a05b_killed_after_the_body_was_sent_the_record_is_unknown_and_stays_executed_once,
}

/// How a row comes to its fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// A first request, which the API answers with 201.
    First,
    /// The API answers 429: the key is free again.
    Released,
    /// The API answers 502: nobody knows.
    Lost,
    /// As `Lost`, where the gateway tells its sinks of unknown records.
    LostTold,
    /// As `Lost`; then a retry, where the policy allows another attempt.
    Retried,
    /// Answered, kept, expired; then the key again.
    Expired,
    /// A first request that the API does not answer while the process lives.
    Held,
    /// The API answers only after the time-out.
    Late,
    /// As `Late`, and before the answer comes an operator says what it was.
    Outlived,
    /// As `Lost`, where the API can be asked; then a retry, for which it knows the order.
    AskedFound,
    /// As `AskedFound`, and the API knows nothing of the order.
    AskedNothing,
    /// A process died over a request that had been sent; the next one meets the fault while it starts or sweeps.
    Inherited,
    /// As `Expired`, left to the sweeper of the next process.
    ExpiredSwept,
    /// Delivered events past their retention, left to the sweeper of the next process.
    EventsSwept,
    /// Nothing is there; the sweeper looks.
    Idle,
    /// Answered; then a clean exit.
    Stopped,
    /// Answered, and the event not yet claimed; the relay of the next process meets the fault.
    Relayed,
    /// As `Relayed`, where the sink fails once, which pauses it: a probe resumes it.
    Paused,
}

/// What the caller is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    /// The connection ends without an answer.
    Nothing,
    /// It depends on who is faster.
    Whatever,
    /// 201, kept.
    Created,
    /// 201, kept in the spill: when it expires is not known yet.
    Spilled,
    /// The API's own answer.
    Status(u16),
    /// The gateway's.
    Problem(&'static str),
}

/// What is left, and what a retry gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// No record: the retry executes.
    Free,
    /// `unknown`, no event: the retry is told so.
    Unknown,
    /// `unknown`, and one event that says so: the retry is told so, too.
    UnknownTold,
    /// `unknown`, no event: the retry is the next attempt.
    Retriable,
    /// `completed` with its events, each delivered: the retry is a replay.
    Completed,
    /// As `Completed`, and the sink got its one event at least this often, once for each claim at most. What a dead relay
    /// had claimed is free nine seconds later at most: twice the sink's time-out, and five.
    Delivered(usize),
    /// As `Completed`, and the audit table tells this often of an outcome that came too late.
    Noted(i64),
    /// As `Completed`, and the sweeper deleted the events after their delivery.
    Swept,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    way: Way,
    fault: &'static str,
    told: Told,
    /// How often the API executed, before the retry.
    runs: usize,
    end: End,
}

const fn dies(way: Way, fault: &'static str, runs: usize, end: End) -> Row {
    Row { way, fault, told: Told::Nothing, runs, end }
}

const fn row(way: Way, fault: &'static str, told: Told, runs: usize, end: End) -> Row {
    Row { way, fault, told, runs, end }
}

/// The way of a first request, arrow by arrow.
const FIRST: &[Row] = &[
    dies(Way::First, "before-reserve=kill", 0, End::Free),
    dies(Way::First, "batch-begun=kill", 0, End::Free),
    dies(Way::First, "batch-committed=kill", 0, End::Unknown),
    dies(Way::First, "after-reserve=kill", 0, End::Unknown),
    dies(Way::First, "before-connect=kill", 0, End::Unknown),
    dies(Way::First, "connected=kill", 0, End::Unknown),
    dies(Way::First, "bytes-sent=kill", 1, End::Unknown),
    dies(Way::First, "answer-head=kill", 1, End::Unknown),
    dies(Way::First, "answer-body=kill", 1, End::Unknown),
    dies(Way::First, "before-complete=kill", 1, End::Unknown),
    dies(Way::First, "batch-begun@2=kill", 1, End::Unknown),
    dies(Way::First, "batch-committed@2=kill", 1, End::Completed),
    dies(Way::First, "after-complete=kill", 1, End::Completed),
    dies(Way::First, "before-reply=kill", 1, End::Completed),
    row(Way::First, "replying=kill", Told::Created, 1, End::Completed),
];

/// On Postgres a completion is one statement.
const FIRST_ON_SQLITE: &[Row] = &[dies(Way::First, "half-completed=kill", 1, End::Unknown)];

/// The other ways of a request.
const LATER: &[Row] = &[
    dies(Way::Released, "before-release=kill", 1, End::Unknown),
    dies(Way::Released, "after-release=kill", 1, End::Free),
    dies(Way::Lost, "before-mark-unknown=kill", 1, End::Unknown),
    dies(Way::Lost, "after-mark-unknown=kill", 1, End::Unknown),
    row(Way::LostTold, "before-announce=kill", Told::Whatever, 1, End::UnknownTold),
    row(Way::LostTold, "after-announce=kill", Told::Whatever, 1, End::UnknownTold),
    dies(Way::Retried, "before-take-over=kill", 1, End::Retriable),
    dies(Way::Retried, "after-take-over=kill", 1, End::Retriable),
    dies(Way::Retried, "connected@2=kill", 1, End::Retriable),
    dies(Way::Retried, "bytes-sent@2=kill", 2, End::Retriable),
    dies(Way::Retried, "after-complete=kill", 2, End::Completed),
    dies(Way::Expired, "before-take-over=kill", 1, End::Free),
    dies(Way::Expired, "after-take-over=kill", 1, End::Unknown),
    row(Way::Late, "late-answer=kill", TIMED_OUT, 1, End::Unknown),
    row(Way::Late, "before-complete=kill", TIMED_OUT, 1, End::Unknown),
    row(Way::Late, "after-complete=kill", TIMED_OUT, 1, End::Completed),
    dies(Way::AskedFound, "question-answered=kill", 1, End::Completed),
    dies(Way::AskedFound, "after-complete=kill", 1, End::Completed),
    dies(Way::AskedNothing, "after-take-over=kill", 1, End::Retriable),
    dies(Way::AskedNothing, "question-answered=kill", 1, End::Retriable),
    dies(Way::AskedNothing, "before-raise=kill", 1, End::Retriable),
    dies(Way::AskedNothing, "after-raise=kill", 1, End::Unknown),
    dies(Way::AskedNothing, "connected@2=kill", 1, End::Unknown),
    dies(Way::AskedNothing, "after-complete=kill", 2, End::Completed),
    row(Way::Outlived, "late-answer=kill", TIMED_OUT, 1, End::Noted(0)),
    row(Way::Outlived, "before-note-late-outcome=kill", TIMED_OUT, 1, End::Noted(0)),
    row(Way::Outlived, "after-note-late-outcome=kill", TIMED_OUT, 1, End::Noted(1)),
];

const TIMED_OUT: Told = Told::Problem("upstream-timeout");

/// Ends that are pending. The caller's answer and the retrier's try do not wait for each other.
const OWED: &[Row] = &[
    row(Way::Lost, "before-mark-unknown=error,settling=kill", Told::Whatever, 1, End::Unknown),
    row(Way::Released, "before-release=error,settling=kill", Told::Whatever, 1, End::Free),
    row(Way::Released, "before-release=error,spilling=kill", Told::Nothing, 1, End::Unknown),
    row(Way::Released, "after-release=error,settling=kill", Told::Whatever, 1, End::Free),
    row(Way::First, "before-complete=error,spilling=kill", Told::Nothing, 1, End::Unknown),
    row(Way::First, "before-complete=error,spilled=kill", Told::Nothing, 1, End::Completed),
    row(Way::First, "before-complete=error,settling=kill", Told::Whatever, 1, End::Completed),
    row(Way::First, "after-complete=error,settling=kill", Told::Whatever, 1, End::Completed),
    row(Way::First, "after-reserve=error,settling=kill", Told::Whatever, 0, End::Unknown),
    row(Way::First, "after-reserve=error,before-release=kill", Told::Whatever, 0, End::Unknown),
    row(Way::First, "after-reserve=error,after-release=kill", Told::Whatever, 0, End::Free),
];

const UNAVAILABLE: Told = Told::Problem("store-unavailable");
const UNKNOWN: Told = Told::Problem("outcome-unknown");

/// The database is lost for a moment: before the statement, or before its answer.
const ERRORS: &[Row] = &[
    row(Way::First, "before-reserve=error", UNAVAILABLE, 0, End::Free),
    row(Way::First, "batch-begun=error", UNAVAILABLE, 0, End::Free),
    row(Way::First, "batch-committed=error", Told::Created, 1, End::Completed),
    row(Way::First, "after-reserve=error", UNAVAILABLE, 0, End::Free),
    row(Way::First, "before-complete=error", Told::Spilled, 1, End::Completed),
    row(Way::First, "batch-begun@2=error", Told::Spilled, 1, End::Completed),
    row(Way::First, "batch-committed@2=error", Told::Created, 1, End::Completed),
    row(Way::First, "after-complete=error", Told::Spilled, 1, End::Completed),
    row(Way::Released, "before-release=error", Told::Status(429), 1, End::Free),
    row(Way::Released, "after-release=error", Told::Status(429), 1, End::Free),
    row(Way::Lost, "before-mark-unknown=error", Told::Status(502), 1, End::Unknown),
    row(Way::Lost, "after-mark-unknown=error", Told::Status(502), 1, End::Unknown),
    row(
        Way::First,
        "before-complete=error,before-complete@2=error,after-complete=error",
        Told::Spilled,
        1,
        End::Completed,
    ),
    row(
        Way::Released,
        "before-release=error,before-release@2=error,after-release=error",
        Told::Status(429),
        1,
        End::Free,
    ),
    row(
        Way::Lost,
        "before-mark-unknown=error,before-mark-unknown@2=error,after-mark-unknown=error",
        Told::Status(502),
        1,
        End::Unknown,
    ),
    row(Way::Retried, "before-take-over=error", UNAVAILABLE, 1, End::Retriable),
    row(Way::Retried, "after-take-over=error", Told::Created, 2, End::Completed),
    row(Way::AskedNothing, "before-take-over=error", UNAVAILABLE, 1, End::Retriable),
    row(Way::AskedNothing, "after-take-over=error", Told::Created, 2, End::Completed),
    row(Way::AskedNothing, "before-raise=error", UNKNOWN, 1, End::Retriable),
    row(Way::AskedNothing, "after-raise=error", Told::Created, 2, End::Completed),
    row(Way::AskedFound, "before-complete=error", UNKNOWN, 1, End::Completed),
    row(Way::AskedFound, "after-complete=error", UNKNOWN, 1, End::Completed),
    row(Way::LostTold, "before-announce=error", Told::Status(502), 1, End::UnknownTold),
    row(Way::LostTold, "after-announce=error", Told::Status(502), 1, End::UnknownTold),
    row(Way::Outlived, "before-note-late-outcome=error", TIMED_OUT, 1, End::Noted(1)),
    row(Way::Outlived, "after-note-late-outcome=error", TIMED_OUT, 1, End::Noted(1)),
    row(Way::Held, "before-heartbeat@2=error", Told::Created, 1, End::Completed),
    row(Way::Held, "after-heartbeat@2=error", Told::Created, 1, End::Completed),
    row(Way::Stopped, "before-retire=error", Told::Created, 1, End::Completed),
    row(Way::Stopped, "after-retire=error", Told::Created, 1, End::Completed),
];

const FAILED: Told = Told::Problem("upstream-failed");

const NOT_SENT: Told = Told::Problem("gateway-failed");

/// The task of a request is lost; its process lives. What is known then is what its record comes to.
const PANICS: &[Row] = &[
    row(Way::First, "after-reserve=panic", NOT_SENT, 0, End::Free),
    row(Way::First, "before-connect=panic", NOT_SENT, 0, End::Free),
    row(Way::First, "connected=panic", NOT_SENT, 0, End::Free),
    row(Way::First, "answer-head=panic", FAILED, 1, End::Unknown),
    row(Way::First, "answer-body=panic", FAILED, 1, End::Unknown),
    row(Way::First, "before-complete=panic", FAILED, 1, End::Completed),
    row(Way::First, "after-complete=panic", FAILED, 1, End::Completed),
    row(Way::Released, "before-release=panic", FAILED, 1, End::Free),
    row(Way::Released, "after-release=panic", FAILED, 1, End::Free),
    row(Way::Released, "before-release=error,settling=panic", Told::Status(429), 1, End::Free),
    row(Way::Lost, "before-mark-unknown=error,settling=panic", Told::Status(502), 1, End::Unknown),
    row(Way::First, "before-complete=error,settling=panic", Told::Spilled, 1, End::Completed),
    row(Way::Lost, "after-mark-unknown=panic", FAILED, 1, End::Unknown),
    row(Way::AskedFound, "question-answered=panic", FAILED, 1, End::Completed),
    row(Way::AskedNothing, "question-answered=panic", FAILED, 1, End::Retriable),
    row(Way::AskedNothing, "after-raise=panic", FAILED, 1, End::Retriable),
];

/// What may still be committed on Postgres when its task is lost, is waited for there, for half a minute.
const PANICS_ON_SQLITE: &[Row] =
    &[row(Way::AskedNothing, "before-raise=panic", FAILED, 1, End::Retriable)];

/// Lease, sweeper, start and end.
const BACKGROUND: &[Row] = &[
    dies(Way::Held, "before-heartbeat@3=kill", 1, End::Unknown),
    dies(Way::Held, "after-heartbeat@3=kill", 1, End::Unknown),
    dies(Way::Idle, "before-heartbeat=kill", 0, End::Free),
    dies(Way::Idle, "after-heartbeat=kill", 0, End::Free),
    dies(Way::Inherited, "before-mark-dead=kill", 1, End::Unknown),
    dies(Way::Inherited, "after-mark-dead=kill", 1, End::Unknown),
    dies(Way::ExpiredSwept, "before-sweep-records=kill", 1, End::Free),
    dies(Way::ExpiredSwept, "after-sweep-records=kill", 1, End::Free),
    dies(Way::EventsSwept, "before-sweep-events=kill", 1, End::Swept),
    dies(Way::EventsSwept, "after-sweep-events=kill", 1, End::Swept),
    dies(Way::Idle, "before-sweep-leases=kill", 0, End::Free),
    dies(Way::Idle, "after-sweep-leases=kill", 0, End::Free),
    row(Way::Stopped, "before-retire=kill", Told::Created, 1, End::Completed),
    row(Way::Stopped, "after-retire=kill", Told::Created, 1, End::Completed),
    row(Way::ExpiredSwept, "before-sweep-records=error", Told::Nothing, 1, End::Free),
    row(Way::ExpiredSwept, "after-sweep-records=error", Told::Nothing, 1, End::Free),
    row(Way::EventsSwept, "before-sweep-events=error", Told::Nothing, 1, End::Swept),
    row(Way::EventsSwept, "after-sweep-events=error", Told::Nothing, 1, End::Swept),
    row(Way::Idle, "before-sweep-leases=error", Told::Nothing, 0, End::Free),
    row(Way::Idle, "after-sweep-leases=error", Told::Nothing, 0, End::Free),
    row(Way::Inherited, "before-mark-dead=error", Told::Nothing, 1, End::Unknown),
    row(Way::Inherited, "after-mark-dead=error", Told::Nothing, 1, End::Unknown),
];

/// From the claim to the acknowledgement.
const RELAY: &[Row] = &[
    dies(Way::Relayed, "before-claim=kill", 1, End::Delivered(1)),
    dies(Way::Relayed, "after-claim=kill", 1, End::Delivered(1)),
    dies(Way::Relayed, "before-delivery=kill", 1, End::Delivered(1)),
    dies(Way::Relayed, "after-delivery=kill", 1, End::Delivered(2)),
    dies(Way::Relayed, "before-acknowledge=kill", 1, End::Delivered(2)),
    dies(Way::Relayed, "after-acknowledge=kill", 1, End::Delivered(1)),
    row(Way::Relayed, "before-claim=error", Told::Nothing, 1, End::Delivered(1)),
    row(Way::Relayed, "after-claim=error", Told::Nothing, 1, End::Delivered(1)),
    row(Way::Relayed, "before-acknowledge=error", Told::Nothing, 1, End::Delivered(1)),
    row(Way::Relayed, "after-acknowledge=error", Told::Nothing, 1, End::Delivered(1)),
    // Passed by the pause, by the probe, and by the resumption.
    dies(Way::Paused, "before-change-sink=kill", 1, End::Delivered(2)),
    dies(Way::Paused, "after-change-sink=kill", 1, End::Delivered(2)),
    row(Way::Paused, "before-change-sink@2=error", Told::Nothing, 1, End::Delivered(2)),
    row(Way::Paused, "after-change-sink@3=error", Told::Nothing, 1, End::Delivered(2)),
    row(Way::Relayed, "before-delivery=panic", Told::Nothing, 1, End::Delivered(1)),
    row(Way::Relayed, "after-delivery=panic", Told::Nothing, 1, End::Delivered(2)),
];

/// A command beside the store: the fault, whether it is done, and how often it stands in the audit table.
#[derive(Clone, Copy, Debug)]
struct Order {
    what: What,
    fault: &'static str,
    done: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Release,
    Complete,
    Redeliver,
    Discard,
    Pause,
}

const fn order_of(what: What, fault: &'static str, done: bool) -> Order {
    Order { what, fault, done }
}

const COMMANDS: &[Order] = &[
    order_of(What::Release, "before-operator-release=kill", false),
    order_of(What::Release, "after-operator-release=kill", true),
    order_of(What::Release, "before-operator-release=error", false),
    order_of(What::Release, "after-operator-release=error", true),
    order_of(What::Complete, "before-operator-complete=kill", false),
    order_of(What::Complete, "after-operator-complete=kill", true),
    order_of(What::Complete, "before-operator-complete=error", false),
    order_of(What::Complete, "after-operator-complete=error", true),
    order_of(What::Redeliver, "before-redeliver=kill", false),
    order_of(What::Redeliver, "audited=kill", false),
    order_of(What::Redeliver, "after-redeliver=kill", true),
    order_of(What::Redeliver, "before-redeliver=error", false),
    order_of(What::Redeliver, "after-redeliver=error", true),
    order_of(What::Discard, "before-discard=kill", false),
    order_of(What::Discard, "audited=kill", false),
    order_of(What::Discard, "after-discard=kill", true),
    order_of(What::Discard, "before-discard=error", false),
    order_of(What::Discard, "after-discard=error", true),
    order_of(What::Pause, "before-operate-sink=kill", false),
    order_of(What::Pause, "after-operate-sink=kill", true),
    order_of(What::Pause, "before-operate-sink=error", false),
    order_of(What::Pause, "after-operate-sink=error", true),
];

/// On Postgres these are one statement.
const COMMANDS_ON_SQLITE: &[Order] = &[
    order_of(What::Release, "audited=kill", false),
    order_of(What::Complete, "audited=kill", false),
];

const MIGRATION: &str = "migrating=kill";

async fn a_first_request_that_dies_on_its_way_is_neither_repeated_nor_forgotten(which: Which) {
    let only = if which == Which::Sqlite { FIRST_ON_SQLITE } else { &[] };
    each([FIRST, only].concat(), move |row| play(which, row)).await;
}

async fn a_later_step_that_dies_is_neither_repeated_nor_forgotten(which: Which) {
    each(LATER.to_vec(), move |row| play(which, row)).await;
}

async fn an_owed_end_that_dies_with_its_process_is_found_again(which: Which) {
    each(OWED.to_vec(), move |row| play(which, row)).await;
}

async fn an_error_of_the_store_is_no_guess(which: Which) {
    each(ERRORS.to_vec(), move |row| play(which, row)).await;
}

async fn a_task_that_panics_frees_only_what_was_not_sent(which: Which) {
    let only = if which == Which::Sqlite { PANICS_ON_SQLITE } else { &[] };
    each([PANICS, only].concat(), move |row| play(which, row)).await;
}

async fn what_works_in_the_background_may_die_at_any_step(which: Which) {
    each(BACKGROUND.to_vec(), move |row| play(which, row)).await;
}

async fn an_event_is_delivered_whatever_the_relay_dies_of(which: Which) {
    each(RELAY.to_vec(), move |row| play(which, row)).await;
}

async fn a_command_that_dies_has_done_all_or_nothing(which: Which) {
    let only = if which == Which::Sqlite { COMMANDS_ON_SQLITE } else { &[] };
    each([COMMANDS, only].concat(), move |order| give(which, order)).await;
}

#[test]
fn a_program_with_fault_points_says_so_and_takes_no_plan_that_would_never_be_met() {
    let (code, version, _) = process::run(&["--version"]);
    assert_eq!((code, version.contains("with fault points")), (0, true), "{version}");
    let (status, errors) = process::run_to_its_end(&["check"], "after-lunch=kill");
    assert_eq!(status.code(), Some(2), "{errors}");
    assert!(errors.contains("there is no such point"), "{errors}");
}

/// A point that no row names is not tested.
#[test]
fn every_fault_point_has_its_row() {
    let rows = [FIRST, FIRST_ON_SQLITE, LATER, OWED, ERRORS, PANICS, BACKGROUND, RELAY].concat();
    let orders = [COMMANDS, COMMANDS_ON_SQLITE].concat();
    let faults = rows.iter().map(|row| row.fault).chain(orders.iter().map(|order| order.fault));
    let faults: BTreeSet<(&str, &str)> = faults
        .chain([MIGRATION])
        .flat_map(|faults| faults.split(','))
        .map(|fault| fault.split_once('=').expect("an act"))
        .map(|(place, act)| (place.split('@').next().expect("a name"), act))
        .collect();
    let mut missing = Vec::new();
    for (point, name) in Point::all() {
        let wanted = if point.can_fail() { &["kill", "error"][..] } else { &["kill"] };
        missing.extend(
            wanted
                .iter()
                .filter(|act| !faults.contains(&(name.as_str(), **act)))
                .map(|act| format!("{name}={act}")),
        );
    }
    assert!(missing.is_empty(), "no row says what is right at {}", missing.join(", "));
}

/// Worlds that live at a time, over all tests: the machine has few cores, and the database few connections.
static WORLDS: Semaphore = Semaphore::const_new(12);

/// Runs all rows side by side, each on a thread. What fails, fails with its row's name.
async fn each<R: Debug + Send + 'static, F: Future<Output = ()>>(
    rows: Vec<R>,
    run: impl Fn(R) -> F + Clone + Send + 'static,
) {
    let mut tasks = JoinSet::new();
    let mut names = HashMap::new();
    for row in rows {
        let (name, run, runtime) = (format!("{row:?}"), run.clone(), Handle::current());
        let task = tasks.spawn_blocking(move || {
            runtime.block_on(async {
                let _slot = WORLDS.acquire().await.expect("a slot");
                run(row).await;
            });
        });
        names.insert(task.id(), name);
    }
    let mut wrong = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        if let Err(error) = ended {
            wrong.push(names[&error.id()].clone());
        }
    }
    assert!(wrong.is_empty(), "these rows went wrong, as said above:\n{}", wrong.join("\n"));
}

/// Waits for what must happen, looking seldom: many wait at a time.
async fn comes(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let end = tokio::time::Instant::now() + PATIENCE;
    while !condition().await {
        assert!(tokio::time::Instant::now() < end, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

const KEY: &str = "k";

/// A policy that asks the API.
const ASKS: &str = r#"on_unknown = "lookup"
lookup = { path = "/orders?client_ref={{ key }}", found = "response.json.total > 0", status = 201, body = "{{ response.json.items[0] }}", settle = "1h" }"#;

/// How often the sweeper of a process looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sweeps {
    Often,
    /// Once, at the start.
    Once,
}

/// API, sink and database, which outlive the gateway.
struct World {
    way: Way,
    which: Which,
    orders: Orders,
    sink: Sink,
    place: Place,
    /// Nobody gives the database up before the test has done its part.
    patient: bool,
}

impl World {
    async fn new(which: Which, way: Way) -> Self {
        let fails = way == Way::Paused;
        let act = move |_: &_, before| {
            if fails && before == 0 { Act::Answer(500, "") } else { OK }
        };
        let (orders, sink) = (Orders::start().await, Sink::start(act).await);
        Self { way, which, orders, sink, place: Place::new(which).await, patient: false }
    }

    fn config(&self, sweeps: Sweeps) -> PathBuf {
        let every = match sweeps {
            Sweeps::Often => "200ms",
            Sweeps::Once => "1h",
        };
        let waits = if self.patient { "timeout = \"1m\"\ncompletion_timeout = \"1m\"" } else { "" };
        let store = format!("lease = \"3s\"\nsweep_every = \"{every}\"\n{waits}");
        let policy = match self.way {
            Way::Retried => "on_unknown = \"retry\"",
            Way::Expired | Way::ExpiredSwept => "retention = \"1s\"",
            Way::Late | Way::Outlived => "timeout = \"500ms\"",
            Way::AskedFound | Way::AskedNothing => ASKS,
            _ => "",
        };
        let policy = format!("wait = \"2s\"\n{policy}");
        let one = matches!(self.way, Way::Relayed | Way::Paused);
        let events = if one { ONE_EVENT } else { TWO_EVENTS };
        let pause = if self.way == Way::Paused { "pause_after = 1\n" } else { "" };
        let sink = fleet::sink(self.sink.port) + pause;
        let outbox = match self.way {
            Way::EventsSwept => "[outbox]\nretention = \"1s\"",
            Way::LostTold => "[outbox]\nunknown_events = true",
            _ => "",
        };
        let more = format!("{events}{sink}{outbox}");
        let url = self.orders.url();
        let toml = rig::config_at(&self.place, &url, "127.0.0.1:0", &store, &policy, &more);
        process::config(self.place.folder.path(), &toml)
    }

    /// A gateway with this fault; none where it is empty.
    fn start(&self, sweeps: Sweeps, fault: &str) -> Gateway {
        let config = self.config(sweeps);
        tokio::task::block_in_place(|| Gateway::with_fault(&config, fault))
    }

    /// `serve` with this fault, which ends it.
    fn serve_to_its_end(&self, fault: &str) -> (std::process::ExitStatus, String) {
        let config = self.config(Sweeps::Often);
        let args = ["serve", "--config", config.to_str().expect("a path of text")];
        tokio::task::block_in_place(|| process::run_to_its_end(&args, fault))
    }

    /// A first request that is answered and kept, and its events delivered, by a process that is gone afterwards.
    async fn one_order(&self) {
        let mut gateway = self.start(Sweeps::Once, "");
        check(Told::Created, order(KEY).send(gateway.addr).await.ok());
        self.delivered().await;
        gateway.kill9();
    }

    async fn delivered(&self) {
        let owed = "select count(*) from outbox_events where status <> 'sent'";
        comes("no event is owed", async || self.place.count(owed).await == 0).await;
    }

    /// Waits until a time is over by the database's clock; its condition on each store.
    async fn is_over(&self, what: &str, sqlite: &str, postgres: &str) {
        let sql = if self.which == Which::Sqlite { sqlite } else { postgres };
        comes(what, async || self.place.count(sql).await > 0).await;
    }

    async fn expired(&self) {
        self.is_over(
            "the retention is over",
            "select count(*) from idempotency_records where expires_at <= unixepoch('subsec') * 1000000",
            "select count(*) from idempotency_records where expires_at <= clock_timestamp()",
        )
        .await;
    }

    async fn record(&self) -> String {
        let sql = format!("select id from idempotency_records where key = '{KEY}'");
        self.place.rows(&sql).await[0][0].clone().expect("an id")
    }
}

/// Whether the caller was told what it must be.
fn check(told: Told, got: Option<Answer>) {
    let got = match (told, got) {
        (Told::Whatever, _) | (Told::Nothing, None) => return,
        (Told::Nothing, Some(got)) => panic!("an answer of a dead gateway: {got:?}"),
        (_, None) => panic!("no answer, where it should be {told:?}"),
        (_, Some(got)) => got,
    };
    match told {
        Told::Created => {
            assert_eq!((got.status.as_u16(), got.replayed()), (201, false), "{got:?}");
            assert_eq!(got.header("oncegate-stored"), None, "{got:?}");
            assert!(got.header("oncegate-expires").is_some(), "{got:?}");
        }
        Told::Spilled => {
            assert_eq!((got.status.as_u16(), got.replayed()), (201, false), "{got:?}");
            assert_eq!(got.header("oncegate-stored"), None, "{got:?}");
            assert_eq!(got.header("oncegate-expires"), None, "{got:?}");
        }
        Told::Status(status) => assert_eq!(got.status.as_u16(), status, "{got:?}"),
        Told::Problem(problem) => assert_eq!(got.problem(), problem, "{got:?}"),
        Told::Nothing | Told::Whatever => {}
    }
}

/// Plays one row to its end.
async fn play(which: Which, row: Row) {
    let world = World::new(which, row.way).await;
    let gateway = match row.way {
        Way::Inherited
        | Way::ExpiredSwept
        | Way::EventsSwept
        | Way::Idle
        | Way::Relayed
        | Way::Paused => {
            world.bequeath().await;
            world.inherit(row.fault).await
        }
        _ => world.ask(&row).await,
    };
    world.answer();
    if (row.way, row.end) == (Way::AskedNothing, End::Retriable) {
        world.only_retries_ask().await;
    }
    world.judge(&gateway, row.runs, row.end).await;
}

impl World {
    /// The API creates orders from now on; asked about the first one, it knows it or not.
    fn answer(&self) {
        let found = match self.way {
            Way::AskedFound => r#"{"total":1,"items":[{"id":"order-1"}]}"#,
            Way::AskedNothing => r#"{"total":0,"items":[]}"#,
            _ => return self.orders.answer_created(),
        };
        self.orders.answer(move |execution| match execution.key() {
            Some(_) => created(execution),
            None => {
                let answer = Response::builder().header("content-type", "application/json");
                answer.body(Full::new(found.into())).expect("an answer")
            }
        });
    }

    /// Waits until nobody asks, and lets the hour pass for retries, while the gateway itself is to ask a day later.
    async fn only_retries_ask(&self) {
        let (change, asked, later) = match self.which {
            Which::Sqlite => (
                "update oncegate_unknown set since = since - 7200000000,
                 next_ask_at = next_ask_at + 86400000000",
                "select count(*) from idempotency_records where status <> 'unknown'",
                "select count(*) from oncegate_unknown
                 where next_ask_at > unixepoch('subsec') * 1000000 + 3600000000",
            ),
            Which::Postgres => (
                "update oncegate_unknown set since = since - interval '2 hours',
                 next_ask_at = next_ask_at + interval '1 day'",
                "select count(*) from idempotency_records where status <> 'unknown'",
                "select count(*) from oncegate_unknown
                 where next_ask_at > clock_timestamp() + interval '1 hour'",
            ),
        };
        comes("only retries ask", async || {
            if self.place.count(asked).await > 0 {
                return false;
            }
            if self.place.count(later).await == 0 {
                self.place.rows(change).await;
            }
            // A question that was under way then has set its own time.
            self.place.count(asked).await == 0 && self.place.count(later).await == 1
        })
        .await;
    }

    /// The request that meets the fault, and who serves afterwards.
    async fn ask(&self, row: &Row) -> Gateway {
        // What is expired must not be swept before it is asked for.
        let sweeps = if self.way == Way::Expired { Sweeps::Once } else { Sweeps::Often };
        let mut gateway = self.start(sweeps, row.fault);
        let send = async || order(KEY).send(gateway.addr).await.ok();
        let told = match self.way {
            Way::Released => {
                self.orders.answer_status(429);
                send().await
            }
            Way::Lost | Way::LostTold => {
                self.orders.answer_status(502);
                send().await
            }
            Way::Retried => {
                self.orders.answer_status(502);
                check(Told::Status(502), send().await);
                self.orders.answer_created();
                send().await
            }
            Way::AskedFound | Way::AskedNothing => {
                self.orders.answer_status(502);
                check(Told::Status(502), send().await);
                self.only_retries_ask().await;
                self.answer();
                send().await
            }
            Way::Expired => {
                check(Told::Created, send().await);
                self.expired().await;
                send().await
            }
            Way::Held => {
                self.orders.hold();
                let asking = sending_or_not(gateway.addr);
                self.orders.asked(1).await;
                // Of a process that kills itself the last lines of its log may be missing.
                if row.fault.contains("=kill") {
                    gateway.died();
                } else {
                    comes("the fault", async || gateway.log().contains("fault point")).await;
                }
                self.orders.go();
                asking.await.expect("the caller")
            }
            Way::Late | Way::Outlived => {
                self.orders.hold();
                let told = send().await;
                if self.way == Way::Outlived {
                    self.operator_completes(&gateway).await;
                }
                self.orders.go();
                told
            }
            _ => send().await,
        };
        check(row.told, told);
        if self.way == Way::Stopped {
            gateway.terminate();
        }
        if row.fault.contains("=kill") {
            gateway.died();
        } else if self.way == Way::Stopped {
            assert!(gateway.exited().success(), "{}", gateway.log());
        }
        if !row.fault.ends_with("=kill") {
            comes("the fault", async || gateway.log().contains("fault point")).await;
        }
        if row.fault.contains("=kill") || self.way == Way::Stopped {
            return self.start(Sweeps::Often, "");
        }
        gateway
    }

    async fn operator_completes(&self, gateway: &Gateway) {
        let body = r#"{"id":"order-1"}"#;
        let args = ["records", "complete", &self.record().await, "--status", "201", "--body", body];
        let (code, _, errors) = tokio::task::block_in_place(|| command(gateway, &args));
        assert_eq!(code, 0, "{errors}");
    }

    /// What a process leaves that the next one meets the fault over.
    async fn bequeath(&self) {
        match self.way {
            Way::Inherited => {
                let mut gateway = self.start(Sweeps::Once, "");
                self.orders.hold();
                let asking = sending_or_not(gateway.addr);
                self.orders.asked(1).await;
                gateway.kill9();
                self.orders.go();
                check(Told::Nothing, asking.await.expect("the caller"));
            }
            Way::ExpiredSwept => {
                self.one_order().await;
                self.expired().await;
            }
            Way::EventsSwept => {
                self.one_order().await;
                self.is_over(
                    "the outbox's retention is over",
                    "select count(*) from outbox_events where sent_at <= (unixepoch('subsec') - 1) * 1000000",
                    "select count(*) from outbox_events where sent_at <= clock_timestamp() - interval '1 second'",
                )
                .await;
            }
            Way::Relayed | Way::Paused => {
                let mut gateway = self.start(Sweeps::Once, "after-complete=kill");
                check(Told::Nothing, order(KEY).send(gateway.addr).await.ok());
                gateway.died();
            }
            _ => {}
        }
    }

    /// The next process meets the fault; and who serves afterwards.
    async fn inherit(&self, fault: &str) -> Gateway {
        let at_start = self.way == Way::Inherited && self.which == Which::Sqlite;
        if fault.contains("=kill") {
            let (status, log) = self.serve_to_its_end(fault);
            assert_eq!(status.signal(), Some(9), "{log}");
        } else if at_start {
            // What the last process left is marked before anything is served.
            let (status, log) = self.serve_to_its_end(fault);
            assert_eq!(status.code(), Some(1), "{log}");
        } else {
            let gateway = self.start(Sweeps::Often, fault);
            comes("the fault", async || gateway.log().contains("fault point")).await;
            return gateway;
        }
        self.start(Sweeps::Often, "")
    }

    /// All that must be true in the end, from all sides.
    async fn judge(&self, gateway: &Gateway, runs: usize, end: End) {
        let running = "select count(*) from idempotency_records where status = 'in_progress'";
        comes("nothing is in progress", async || self.place.count(running).await == 0).await;
        match end {
            End::Free => {
                let gone = async || self.place.status_of(KEY).await.is_none();
                comes("the record is gone", gone).await;
            }
            End::Swept => comes("no event is kept", async || self.place.events().await == 0).await,
            End::UnknownTold => {
                comes("it is told", async || self.place.events().await == 1).await;
            }
            End::Noted(times) => {
                let noted = "select count(*) from audit_log where action = 'late_outcome'";
                let told = async || self.place.count(noted).await == times;
                comes("the late outcome is noted", told).await;
            }
            // Where it is not found by the retry, the gateway itself finds it.
            End::Completed if self.way == Way::AskedFound => {
                let completed =
                    "select count(*) from idempotency_records where status = 'completed'";
                comes("it is found", async || self.place.count(completed).await == 1).await;
            }
            End::Unknown | End::Retriable | End::Completed | End::Delivered(_) => {}
        }
        self.delivered().await;
        let (status, again) = match end {
            End::Free => (None, Told::Created),
            End::Unknown | End::UnknownTold => (Some("unknown"), Told::Problem("outcome-unknown")),
            End::Retriable => (Some("unknown"), Told::Created),
            End::Completed | End::Delivered(_) | End::Noted(_) | End::Swept => {
                (Some("completed"), Told::Status(201))
            }
        };
        assert_eq!(self.place.status_of(KEY).await.as_deref(), status);
        self.orders.asked(runs).await;
        assert_eq!(self.orders.runs_of(KEY), runs, "executions");
        self.judge_events(end).await;

        // A duplicate that comes while an end is still owed is told what that attempt came to.
        let settled = async || fleet::metric(gateway.admin, "oncegate_settling").await == 0;
        comes("nothing is owed", settled).await;
        let retry = order(KEY).to(gateway.addr).await;
        check(again, Some(retry.clone()));
        let more = usize::from(again == Told::Created);
        assert_eq!(self.orders.runs_of(KEY), runs + more, "executions after the retry");
        if again == Told::Status(201) {
            assert!(retry.replayed(), "{retry:?}");
            assert_eq!(retry.record(), self.record().await);
            let ledger = self.orders.ledger();
            let executed = ledger.iter().rfind(|execution| execution.key().is_some());
            let execution = executed.expect("an execution").id;
            assert_eq!(retry.json()["id"], format!("order-{execution}"));
        }
    }

    /// Events stand exactly where an answer is kept; each was delivered under its one id, always as the same bytes.
    async fn judge_events(&self, end: End) {
        let first_was_kept = matches!(self.way, Way::Expired | Way::ExpiredSwept);
        let written = match end {
            End::Delivered(_) | End::UnknownTold => 1,
            End::Completed | End::Noted(_) | End::Swept => 2,
            End::Free | End::Unknown | End::Retriable => 2 * i64::from(first_was_kept),
        };
        let kept = if end == End::Swept { 0 } else { written };
        assert_eq!(self.place.events().await, kept, "events in the outbox");
        let seen = self.sink.seen();
        assert!(seen.iter().all(|delivery| delivery.verified), "all signatures are valid");
        assert_eq!(self.sink.ids().len() as i64, written, "events at the sink");
        let contents: BTreeSet<_> =
            seen.iter().map(|delivery| (delivery.id(), delivery.body.clone())).collect();
        assert_eq!(contents.len() as i64, written, "one id, one body");
        if let End::Delivered(times) = end {
            // A slow machine may need more claims, never more deliveries than claims.
            let claims = self.place.count("select max(claim_no) from outbox_done").await;
            assert!(seen.len() >= times, "{} deliveries, not {times}", seen.len());
            assert!(seen.len() as i64 <= claims, "{} deliveries, {claims} claims", seen.len());
        }
    }
}

/// A request that runs beside the test, and may get no answer.
fn sending_or_not(to: std::net::SocketAddr) -> tokio::task::JoinHandle<Option<Answer>> {
    tokio::spawn(async move { order(KEY).send(to).await.ok() })
}

/// Gives one command to its end.
async fn give(which: Which, given: Order) {
    let on_event = matches!(given.what, What::Redeliver | What::Discard);
    let delivered = on_event || given.what == What::Pause;
    let world = World::new(which, if delivered { Way::Relayed } else { Way::Lost }).await;
    let id = if delivered {
        world.one_order().await;
        if given.what == What::Discard {
            world.place.rows("update outbox_done set outcome = 'dead'").await;
        }
        world.place.rows("select id from outbox_events").await[0][0].clone().expect("an id")
    } else {
        let mut gateway = world.start(Sweeps::Once, "");
        world.orders.answer_status(502);
        check(Told::Status(502), order(KEY).send(gateway.addr).await.ok());
        gateway.kill9();
        world.record().await
    };
    let (args, action): (&[&str], _) = match given.what {
        What::Release => (&["records", "release", &id], "record.release"),
        What::Complete => {
            let body = r#"{"id":"order-1"}"#;
            (&["records", "complete", &id, "--status", "201", "--body", body], "record.complete")
        }
        What::Redeliver => (&["events", "redeliver", &id, "--all-sinks"], "event.redeliver"),
        What::Pause => (&["sinks", "pause", "main"], "sink.pause"),
        What::Discard => (&["events", "discard", &id], "event.discard"),
    };
    let config = world.config(Sweeps::Once);
    let args = [args, &["--config", config.to_str().expect("a path of text")]].concat();
    let (status, errors) =
        tokio::task::block_in_place(|| process::run_to_its_end(&args, given.fault));
    if given.fault.contains("=kill") {
        assert_eq!(status.signal(), Some(9), "{errors}");
    } else {
        assert_eq!(status.code(), Some(1), "what may not be done is not called done: {errors}");
        let look = match given.what {
            What::Redeliver | What::Discard => format!("events show {id}"),
            What::Pause => "sinks list".to_owned(),
            What::Release | What::Complete => format!("records show {id}"),
        };
        let says = if given.done {
            format!("it is not known whether the change was made: see `oncegate {look}`")
        } else {
            "the database is not available".to_owned()
        };
        assert!(errors.contains(&says), "{errors}");
    }
    let audit = format!("select count(*) from audit_log where action = '{action}'");
    assert_eq!(world.place.count(&audit).await, i64::from(given.done), "rows of the audit");
    let end = match given.what {
        What::Release if given.done => End::Free,
        What::Complete if given.done => End::Completed,
        What::Release | What::Complete => End::Unknown,
        What::Redeliver => End::Delivered(1 + usize::from(given.done)),
        What::Pause => End::Delivered(1),
        What::Discard => {
            let gone = "select count(*) from outbox_done where outcome = 'discarded'";
            assert_eq!(world.place.count(gone).await, i64::from(given.done));
            // It was delivered once, as the judge expects of it.
            world.place.rows("update outbox_done set outcome = 'sent'").await;
            End::Delivered(1)
        }
    };
    let gateway = world.start(Sweeps::Often, "");
    world.orders.answer_created();
    world.judge(&gateway, 1, end).await;
}

async fn a_migration_that_dies_is_done_again(which: Which) {
    let world = World::new(which, Way::First).await;
    let config = world.config(Sweeps::Often);
    let args = ["migrate", "--config", config.to_str().expect("a path of text")];
    let (status, log) = process::run_to_its_end(&args, MIGRATION);
    assert_eq!(status.signal(), Some(9), "{log}");
    let made = match which {
        Which::Sqlite => "select count(*) from sqlite_master where name = 'idempotency_records'",
        Which::Postgres => "select count(*) from pg_tables where tablename = 'idempotency_records'",
    };
    assert_eq!(world.place.count(made).await, 0, "nothing of it is left");
    let gateway = world.start(Sweeps::Often, "");
    check(Told::Created, order(KEY).send(gateway.addr).await.ok());
    world.judge(&gateway, 1, End::Completed).await;
}

/// The row's owner lives and knows nothing of it.
async fn a_row_of_this_process_that_nobody_works_on_is_unknown(which: Which) {
    let world = World::new(which, Way::First).await;
    let gateway = world.start(Sweeps::Often, "");
    world.orders.answer_status(502);
    check(Told::Status(502), order(KEY).send(gateway.addr).await.ok());
    let running = "update idempotency_records set status = 'in_progress', owner = \
                   (select owner from oncegate_owners order by lease_until desc limit 1) returning id";
    assert_eq!(world.place.rows(running).await.len(), 1);
    check(Told::Problem("outcome-unknown"), order(KEY).send(gateway.addr).await.ok());
    world.judge(&gateway, 1, End::Unknown).await;
}

/// What a caller and an operator see of an unknown record, and that the operator's word ends it.
async fn unknown_until_an_operator_speaks(world: &World, gateway: &Gateway, runs: usize) {
    world.judge(gateway, runs, End::Unknown).await;
    let record = world.record().await;
    assert_eq!(listed(gateway, "unknown"), [record.as_str()], "an operator sees it");
    assert!(listed(gateway, "in_progress").is_empty(), "nothing stays in progress");
    let args: &[&str] = if runs == 0 {
        &["records", "release", &record]
    } else {
        &["records", "complete", &record, "--status", "201", "--body", "{\"id\":\"order-1\"}"]
    };
    let (code, _, errors) = command(gateway, args);
    assert_eq!(code, 0, "{errors}");
    let retry = order(KEY).to(gateway.addr).await;
    assert_eq!((retry.status.as_u16(), retry.replayed()), (201, runs == 1), "{retry:?}");
    assert_eq!(world.orders.runs_of(KEY), 1);
}

async fn a05a_killed_before_it_connects_the_record_is_unknown_and_stays_unexecuted(which: Which) {
    let world = World::new(which, Way::First).await;
    let gate = world.place.folder.path().join("gate");
    let fault = format!("before-connect=pause:{}", gate.display());
    let mut first = world.start(Sweeps::Once, &fault);
    let other = (which == Which::Postgres).then(|| world.start(Sweeps::Often, ""));
    let asking = sending_or_not(first.addr);
    let reached = gate.with_extension("reached");
    comes("it stands before it connects", async || reached.exists()).await;
    // While its owner lives, the record is in progress, on whichever replica one asks.
    let duplicate = order(KEY).to(other.as_ref().unwrap_or(&first).addr).await;
    check(Told::Problem("in-progress"), Some(duplicate));
    assert_eq!(world.orders.runs(), 0);
    first.kill9();
    check(Told::Nothing, asking.await.expect("the caller"));
    let other = other.unwrap_or_else(|| world.start(Sweeps::Often, ""));
    unknown_until_an_operator_speaks(&world, &other, 0).await;
}

async fn a05b_killed_after_the_body_was_sent_the_record_is_unknown_and_stays_executed_once(
    which: Which,
) {
    let world = World::new(which, Way::First).await;
    let mut first = world.start(Sweeps::Once, "bytes-sent=kill");
    let other = (which == Which::Postgres).then(|| world.start(Sweeps::Often, ""));
    check(Told::Nothing, order(KEY).send(first.addr).await.ok());
    first.died();
    let other = other.unwrap_or_else(|| world.start(Sweeps::Often, ""));
    unknown_until_an_operator_speaks(&world, &other, 1).await;
}

/// Makes each change of a record wait in the database until it is let go. Not by a lock: batches do not wait for one.
struct Held<'a>(&'a Place);

impl<'a> Held<'a> {
    async fn at(place: &'a Place) -> Self {
        let held = "CREATE TABLE go (now bool);
            CREATE FUNCTION held() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                WHILE NOT EXISTS (SELECT FROM go) LOOP PERFORM pg_sleep(0.005); END LOOP;
                RETURN NEW;
            END $$;
            CREATE TRIGGER held BEFORE INSERT OR UPDATE ON idempotency_records
                FOR EACH ROW EXECUTE FUNCTION held()";
        let (client, connection) =
            tokio_postgres::connect(&place.url, tokio_postgres::NoTls).await.expect("the database");
        tokio::spawn(connection);
        client.batch_execute(held).await.expect("a trigger");
        Self(place)
    }

    /// Waits until the statement of this name has arrived and waits.
    async fn meets(&self, name: &str) {
        let sql = format!(
            "select count(*) from pg_stat_activity where datname = current_database()
               and wait_event = 'PgSleep' and query like '-- {name}%'"
        );
        comes("the statement waits", async || self.0.count(&sql).await == 1).await;
    }

    async fn go(self) {
        self.0.rows("INSERT INTO go VALUES (true)").await;
    }
}

/// The statement is with the server, its answer can reach nobody any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_reservation_that_commits_after_its_process_died_is_unknown() {
    let world = World::new(Which::Postgres, Way::First).await;
    let mut gateway = world.start(Sweeps::Once, "");
    let held = Held::at(&world.place).await;
    let asking = sending_or_not(gateway.addr);
    held.meets("reserve").await;
    gateway.kill9();
    check(Told::Nothing, asking.await.expect("the caller"));
    assert_eq!(world.place.records().await, 0);
    held.go().await;
    comes("it is committed", async || world.place.records().await == 1).await;
    let next = world.start(Sweeps::Often, "");
    world.judge(&next, 0, End::Unknown).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_that_commits_after_its_process_died_is_kept_with_its_events() {
    let mut world = World::new(Which::Postgres, Way::First).await;
    world.patient = true;
    let mut gateway = world.start(Sweeps::Once, "");
    world.orders.hold();
    let asking = sending_or_not(gateway.addr);
    world.orders.asked(1).await;
    let held = Held::at(&world.place).await;
    world.orders.go();
    held.meets("complete").await;
    gateway.kill9();
    check(Told::Nothing, asking.await.expect("the caller"));
    assert_eq!(world.place.events().await, 0);
    held.go().await;
    comes("it is committed", async || world.place.events().await == 2).await;
    let next = world.start(Sweeps::Often, "");
    world.judge(&next, 1, End::Completed).await;
}
