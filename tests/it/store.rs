//! One suite for the `Store` trait: each promise is a check, and each store runs them all.
//!
//! Each check gets a database of its own, since sweeps and marks reach over all of it. Time is made to pass by leases
//! and retentions of zero, and by waiting for a condition.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use oncegate::record::event::Event;
use oncegate::record::event::notice::{Notice, NoticeKind, Resolution};
use oncegate::record::event::subscription::{Subscriber, TypeFilter};
use oncegate::record::{
    Answer, Attempt, Caller, Fence, Fingerprint, KeptBody, Key, LookupDelay, Operation, OwnerId,
    RecordId, Scope, Spelling, State, Status, Tenant,
};
use oncegate::store::{
    ATTEMPTS_KEPT, Acknowledgement, AttemptRow, Changed, Chosen, Claim, Claimed, Completion,
    DeadFilter, EventFilter, EventStatus, Heartbeat, Lane, LateEnd, LateOutcome, Look, LookupRule,
    LookupTrigger, NextProbe, Objection, OnDead, Operator, Order, PauseReason, Proposal, Reclaim,
    RecordFilter, Reinstated, Reserved, ScanFrom, Settled, SinkChange, SinkOrder, SinkState, Store,
    Takeover, Touched, Trouble, Unannounced, Verdict, Woken,
};
use uuid::Uuid;

use crate::support::{eventually, happens};
use crate::transition::{Change, Next, transition};

/// Runs each named check on each store.
macro_rules! on_every_store {
    ($($check:ident),* $(,)?) => {
        mod sqlite {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $check() {
                    let dir = tempfile::tempdir().unwrap();
                    super::$check(crate::sqlite::open(&dir.path().join("t.db")).await).await;
                }
            )*
        }
        mod postgres {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $check() {
                    super::$check(crate::postgres::open().await).await;
                }
            )*
        }
    };
}

on_every_store![
    each_change_leads_where_the_transition_function_says,
    a_reservation_is_held_once_and_found_by_others,
    a_record_says_who_asked_for_its_current_attempt,
    an_own_reservation_proposed_again_is_held,
    without_a_live_lease_nothing_is_reserved_or_taken_over,
    of_many_concurrent_proposals_exactly_one_is_held,
    tenants_and_operations_do_not_share_keys,
    a_late_process_changes_nothing,
    a_release_forgets_only_the_first_attempt,
    of_many_takeovers_of_an_expired_row_exactly_one_wins,
    retention_ends_by_the_databases_clock,
    a_completion_writes_answer_and_events_once,
    an_unknown_attempt_may_still_complete,
    a_late_outcome_is_noted_once_with_all_of_it,
    a_doubt_is_told_once_and_its_end_once,
    a_doubts_end_says_who_ended_it,
    only_a_dead_owners_records_are_marked,
    an_unknown_record_is_asked_about_by_one_at_a_time,
    a_retry_asks_without_waiting_for_the_next_question,
    what_is_asked_about_is_raised_by_whoever_asks_and_nobody_else,
    what_ended_while_it_was_asked_about_is_not_raised,
    what_was_forgotten_is_brought_back_and_takes_nobodys_place,
    what_was_put_back_to_an_earlier_attempt_goes_on_from_a_later_one,
    what_an_operator_has_acted_on_is_not_brought_back,
    an_owner_finds_what_it_has_in_progress,
    a_doubt_begins_when_the_outcome_is_lost_and_goes_on_through_questions,
    the_upstream_is_left_alone_until_it_has_settled,
    an_ended_lease_is_never_renewed,
    sweeps_leave_everything_that_is_not_over,
    a_late_delivery_stays_visible_for_its_whole_retention,
    an_event_that_is_dead_towards_one_sink_is_kept_whole,
    a_claim_takes_no_more_than_its_limit_and_nothing_twice,
    a_claim_from_a_place_on_takes_what_became_due_there,
    in_order_a_claim_from_a_place_on_takes_only_the_first_of_a_key,
    of_one_ordering_key_one_event_is_claimed_and_its_verdict_wakes_the_next,
    a_dead_event_blocks_its_ordering_key_where_that_is_asked_for,
    the_turn_of_a_claim_that_is_over_goes_to_the_same_event,
    concurrent_claims_never_share_an_event,
    claims_of_an_owner_without_a_lease_are_free_at_once,
    a_stale_acknowledgement_changes_nothing,
    verdicts_move_events_as_they_say,
    redelivery_goes_on_from_the_claim_number,
    redelivery_leaves_those_alone_who_took_it_unless_it_is_asked_for,
    what_is_done_to_all_dead_events_is_told_of_each_of_their_records,
    what_an_order_kept_back_goes_once_it_is_no_longer_asked_for,
    what_waits_for_nobody_is_woken,
    a_sink_is_paused_once_and_resumed_by_its_probe,
    one_probes_a_sink_at_a_time_and_a_late_probe_changes_nothing,
    a_pause_by_an_operator_or_of_a_sink_that_is_gone_is_not_probed,
    what_is_given_back_keeps_its_attempts_and_says_what_it_met,
    what_a_sink_met_last_is_known_until_it_is_given_up_and_then,
    each_failed_attempt_under_a_current_claim_is_kept,
    no_more_attempts_than_fifty_are_kept_and_they_go_with_their_event,
    a_discarded_event_is_over_and_what_is_sent_or_in_flight_is_left_alone,
    dead_events_are_chosen_by_what_they_are,
    the_next_due_event_is_known,
    answers_come_back_byte_for_byte,
    operators_resolve_only_what_nobody_works_on,
    lists_filter_and_go_on_where_they_stopped,
    a_database_is_known_by_its_id,
];

pub(crate) type Tested = Arc<dyn Store>;

const MINUTE: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(10);
/// The upstream may be asked at once.
const NOW: LookupDelay = LookupDelay { after_loss: Duration::ZERO, after_lease: Duration::ZERO };

fn deadline() -> Instant {
    Instant::now() + MINUTE
}

/// A scope that no other check has.
fn scope() -> Scope {
    Scope {
        tenant: Tenant::parse(&format!("t-{}", Uuid::new_v4())).unwrap(),
        operation: Operation::parse("orders.create").unwrap(),
        key: Key::parse("k").unwrap(),
    }
}

fn fingerprint(seed: u8) -> Fingerprint {
    Fingerprint { canonical: [seed; 32], raw: [seed ^ 0xff; 32], recipe: [7; 8] }
}

async fn owner(store: &Tested) -> OwnerId {
    let owner = OwnerId::fresh();
    assert_eq!(store.heartbeat(owner, MINUTE).await.unwrap(), Heartbeat::Renewed);
    owner
}

fn proposal(scope: &Scope, owner: OwnerId) -> Proposal {
    Proposal {
        id: RecordId::fresh(),
        scope: scope.clone(),
        fingerprint: fingerprint(1),
        owner,
        caller: Some("alice".into()),
        context: Some(Bytes::from_static(b"{\"n\":1}")),
        retention: Duration::from_secs(3600),
    }
}

/// A reservation under a new live owner.
async fn held(store: &Tested, scope: &Scope) -> (Fence, OwnerId) {
    let owner = owner(store).await;
    let proposal = proposal(scope, owner);
    let fence = Fence { id: proposal.id, attempt: Attempt::FIRST };
    assert_eq!(store.reserve(proposal, deadline()).await.unwrap(), Reserved::Held);
    (fence, owner)
}

fn answer() -> Answer {
    let mut headers = HeaderMap::new();
    headers.insert("content-type", HeaderValue::from_static("application/json"));
    let body = KeptBody::Whole(Bytes::from_static(b"{\"id\":1}"));
    Answer { status: StatusCode::CREATED, headers, spelling: Spelling::default(), body }
}

fn event(fence: Fence, name: &str, sinks: &[&str]) -> Event {
    let key = format!("{}/{name}", fence.id);
    Event {
        id: Uuid::new_v5(&Uuid::NAMESPACE_OID, key.as_bytes()),
        key,
        kind: name.into(),
        position: 0,
        ordering_key: None,
        payload: Bytes::from_static(b"{\"a\":1.0}"),
        sinks: sinks.iter().map(|sink| (*sink).to_owned()).collect(),
    }
}

fn completion(scope: &Scope, fence: Fence, events: Vec<Event>) -> Completion {
    Completion { scope: scope.clone(), fence, answer: answer(), retention: MINUTE, events }
}

async fn complete(store: &Tested, completion: Completion) -> Settled {
    store.complete(completion.into(), deadline()).await.unwrap()
}

fn is_done(settled: Settled) -> bool {
    matches!(settled, Settled::Done { .. })
}

/// An expired completed record.
async fn expired(store: &Tested, scope: &Scope) -> Fence {
    let (fence, _) = held(store, scope).await;
    let settled = Completion { retention: Duration::ZERO, ..completion(scope, fence, vec![]) };
    assert!(is_done(complete(store, settled).await));
    fence
}

/// A proposal of a record that no database knows, and its fence.
fn forgotten(scope: &Scope, owner: OwnerId) -> (Proposal, Fence) {
    let proposal = proposal(scope, owner);
    let fence = Fence { id: proposal.id, attempt: Attempt::FIRST };
    (proposal, fence)
}

async fn bring(store: &Tested, proposal: &Proposal) -> Reinstated {
    store.reinstate(proposal.clone(), Attempt::FIRST).await.unwrap()
}

async fn what_was_forgotten_is_brought_back_and_takes_nobodys_place(store: Tested) {
    let (scope, dead) = (&scope(), OwnerId::fresh());
    let (lost, fence) = forgotten(scope, dead);
    assert_eq!(bring(&store, &lost).await, Reinstated::LeaseEnded);
    let living = owner(&store).await;
    let lost = Proposal { owner: living, ..lost };
    assert_eq!(bring(&store, &lost).await, Reinstated::Yes);
    assert_eq!(bring(&store, &lost).await, Reinstated::No, "it is there");
    let found = store.find(scope).await.unwrap().unwrap();
    assert_eq!((found.fence, found.fingerprint), (fence, lost.fingerprint));
    assert_eq!(found.state, State::InProgress { owner: living, owner_lives: true });
    let ids = [fence.id, RecordId::fresh()];
    assert_eq!(store.statuses(&ids).await.unwrap(), [(fence, Status::InProgress)]);

    let events = vec![event(fence, "again", &["s"])];
    assert!(is_done(complete(&store, completion(scope, fence, events)).await));
    assert_eq!(bring(&store, &lost).await, Reinstated::No, "it is completed");
    assert_eq!(store.statuses(&ids).await.unwrap(), [(fence, Status::Completed)]);
    assert_eq!(claim(&store, "s", Lane::Fresh, 10, MINUTE).await.len(), 1);

    for by in [living, dead] {
        let (other, _) = forgotten(scope, by);
        assert_eq!(bring(&store, &other).await, Reinstated::No, "another record stands there");
    }
    let found = store.find(scope).await.unwrap().unwrap();
    assert_eq!(found.fence, fence);
    assert!(matches!(found.state, State::Completed(_)));
}

async fn what_was_put_back_to_an_earlier_attempt_goes_on_from_a_later_one(store: Tested) {
    let scope = &scope();
    let (first, owner) = held(&store, scope).await;
    assert_eq!(store.mark_unknown(scope, first).await.unwrap(), Changed::Yes);
    let second = Fence { attempt: first.attempt.next(), ..first };
    let later = Proposal { id: first.id, caller: Some("bob".into()), ..proposal(scope, owner) };
    let bring = async |attempt| store.reinstate(later.clone(), attempt).await.unwrap();
    assert_eq!(bring(first.attempt).await, Reinstated::No, "it is there, and unknown");
    assert_eq!(status(&store, scope).await, Some((Status::Unknown, 1)));
    assert_eq!(bring(second.attempt).await, Reinstated::Yes);
    assert_eq!(status(&store, scope).await, Some((Status::InProgress, 2)));
    assert_eq!(complete(&store, completion(scope, first, vec![])).await, Settled::Fenced);
    assert_eq!(bring(first.attempt).await, Reinstated::No, "an earlier one takes nothing back");
    assert!(is_done(complete(&store, completion(scope, second, vec![])).await));
    assert_eq!(bring(second.attempt.next()).await, Reinstated::No, "what is completed stays so");
    assert_eq!(status(&store, scope).await, Some((Status::Completed, 2)));
}

async fn what_an_operator_has_acted_on_is_not_brought_back(store: Tested) {
    let scope = &scope();
    let (fence, owner) = held(&store, scope).await;
    assert_eq!(store.mark_unknown(scope, fence).await.unwrap(), Changed::Yes);
    assert_eq!(store.operator_release(fence, false, &somebody()).await.unwrap(), Ok(()));
    let gone = Proposal { id: fence.id, ..proposal(scope, owner) };
    assert_eq!(bring(&store, &gone).await, Reinstated::ActedOn);
    assert_eq!(status(&store, scope).await, None);
    let next = proposal(scope, owner);
    assert_eq!(store.reserve(next, deadline()).await.unwrap(), Reserved::Held);
    assert_eq!(bring(&store, &gone).await, Reinstated::ActedOn, "its key is rightly another's");
}

async fn an_owner_finds_what_it_has_in_progress(store: Tested) {
    let (mine, other) = (owner(&store).await, owner(&store).await);
    let mut open = Vec::new();
    for n in 0..9 {
        let (scope, by) = (scope(), if n % 3 == 0 { other } else { mine });
        let (proposal, fence) = forgotten(&scope, by);
        assert_eq!(store.reserve(proposal, deadline()).await.unwrap(), Reserved::Held);
        if n % 3 == 1 {
            open.push((scope, fence));
        } else {
            assert!(is_done(complete(&store, completion(&scope, fence, vec![])).await));
        }
    }
    for (begin, limit) in
        [(ScanFrom::Oldest, 3), (ScanFrom::Oldest, 100), (ScanFrom::Ago(MINUTE), 4)]
    {
        let (mut found, mut from) = (Vec::new(), Some(begin));
        while let Some(at) = from {
            let piece = store.open_of(mine, at, limit).await.unwrap();
            from = piece.last.map(|(at, id)| ScanFrom::After(at, id));
            found.extend(piece.open);
        }
        found.sort_by_key(|(_, fence)| fence.id);
        assert_eq!(found, open);
    }
    let late = store.open_of(mine, ScanFrom::Ago(Duration::ZERO), 100).await.unwrap();
    assert_eq!(late.last, None, "nothing is younger than now");
}

/// The status of the record under a scope, and its attempt.
async fn status(store: &Tested, scope: &Scope) -> Option<(Status, u32)> {
    let record = store.find(scope).await.unwrap()?;
    let status = match record.state {
        State::InProgress { .. } => Status::InProgress,
        State::Unknown => Status::Unknown,
        State::Completed(_) => Status::Completed,
    };
    Some((status, record.fence.attempt.number()))
}

fn somebody() -> Operator {
    Operator { who: "olga".into(), why: Some("asked the bank".into()) }
}

/// A sink that no other check has.
fn sink() -> String {
    format!("sink-{}", Uuid::new_v4())
}

/// Writes one event for each name, all to `sink`; the record's fence and scope.
pub(crate) async fn announced(store: &Tested, sink: &str, names: &[&str]) -> (Scope, Fence) {
    let scope = scope();
    let (fence, _) = held(store, &scope).await;
    let events = names.iter().map(|name| event(fence, name, &[sink])).collect();
    assert!(is_done(complete(store, completion(&scope, fence, events)).await));
    (scope, fence)
}

async fn claim(
    store: &Tested,
    sink: &str,
    lane: Lane,
    limit: u32,
    lease: Duration,
) -> Vec<Claimed> {
    let (owner, reclaim) = (OwnerId::fresh(), Reclaim::Expired);
    let claim = Claim {
        sink: sink.into(),
        lane,
        order: Order::None,
        limit,
        owner,
        lease,
        reclaim,
        look: Look::Complete,
    };
    store.claim(&claim).await.unwrap()
}

/// All that is due at once, as a process that may, or may not, judge others.
async fn claim_as(store: &Tested, sink: &str, owner: OwnerId, reclaim: Reclaim) -> Vec<Claimed> {
    let (sink, lane, lease) = (sink.to_owned(), Lane::Fresh, MINUTE);
    let claim = Claim {
        sink,
        lane,
        order: Order::None,
        limit: 10,
        owner,
        lease,
        reclaim,
        look: Look::Quick,
    };
    store.claim(&claim).await.unwrap()
}

/// Until the clock of every store has gone on: what comes now is later. That of SQLite counts milliseconds.
async fn tick() {
    let begun = Instant::now();
    eventually("time passes", SOON, || begun.elapsed() > Duration::from_millis(2)).await;
}

/// From a place on, one at most; `share` of the time between the oldest and the newest.
async fn claim_from(
    store: &Tested,
    sink: &str,
    lane: Lane,
    order: Order,
    share: u16,
) -> Option<String> {
    let (owner, reclaim, lease) = (OwnerId::fresh(), Reclaim::Expired, MINUTE);
    let (sink, look) = (sink.to_owned(), Look::From(share));
    let claim = Claim { sink, lane, order, limit: 1, owner, lease, reclaim, look };
    let mut found = store.claim(&claim).await.unwrap();
    assert!(found.len() <= 1);
    found.pop().map(|claimed| claimed.kind)
}

async fn a_claim_from_a_place_on_takes_what_became_due_there(store: Tested) {
    let (sink, other) = (&sink(), &sink());
    for name in ["a", "b", "c", "d", "e"] {
        announced(&store, sink, &[name]).await;
        tick().await;
    }
    announced(&store, other, &["of another sink"]).await;
    let (oldest, newest) = (0, u16::MAX);
    let from = async |share| claim_from(&store, sink, Lane::Fresh, Order::None, share).await;
    assert_eq!(claim_from(&store, sink, Lane::Retry, Order::None, oldest).await, None);
    assert_eq!(from(newest).await.as_deref(), Some("e"));
    // What is claimed, or of another sink or lane, is no end.
    assert_eq!(from(newest).await.as_deref(), Some("d"));
    assert_eq!(from(oldest).await.as_deref(), Some("a"));
    assert_eq!(from(newest / 2).await.as_deref(), Some("c"), "b stands before the middle");
    assert_eq!(from(newest / 2).await.as_deref(), Some("b"), "the only one is everywhere");
    assert_eq!(from(newest / 2).await, None);
    // Nor is what is not due yet.
    let again = claim(&store, other, Lane::Fresh, 1, MINUTE).await.remove(0);
    let later = Verdict::Retry { delay: MINUTE, status: None, error: "x".into() };
    assert!(verdict(&store, other, &again, later).await);
    assert_eq!(claim_from(&store, other, Lane::Retry, Order::None, newest).await, None);
}

async fn in_order_a_claim_from_a_place_on_takes_only_the_first_of_a_key(store: Tested) {
    let sink = &sink();
    for event in [("a", Some("k")), ("b", Some("l")), ("c", Some("k")), ("d", None)] {
        announced_in_order(&store, sink, &[event]).await;
        tick().await;
    }
    let from = async |share| claim_from(&store, sink, Lane::Fresh, FREE, share).await;
    assert_eq!(from(u16::MAX).await.as_deref(), Some("d"));
    assert_eq!(from(u16::MAX).await, None, "before c stands a");
    assert_eq!(from(u16::MAX).await.as_deref(), Some("b"), "and c is deferred");
    let first = in_order(&store, sink, Lane::Fresh, FREE).await;
    assert_eq!(names(&first), ["a"]);
    say(&store, sink, FREE, &first[0], Verdict::Sent { status: None }).await;
    assert_eq!(from(0).await.as_deref(), Some("c"), "its turn has come");
}

async fn claims_of_an_owner_without_a_lease_are_free_at_once(store: Tested) {
    announced(&store, "s", &["a", "b"]).await;
    let (first, second, third) = (owner(&store).await, owner(&store).await, owner(&store).await);
    let lost = claim_as(&store, "s", first, Reclaim::Expired).await;
    assert_eq!(lost.len(), 2);
    assert!(
        claim_as(&store, "s", second, Reclaim::ExpiredOrOrphaned).await.is_empty(),
        "the first lives"
    );
    store.retire(first).await.unwrap();
    assert!(
        claim_as(&store, "s", second, Reclaim::Expired).await.is_empty(),
        "who may not judge waits"
    );

    let taken = claim_as(&store, "s", second, Reclaim::ExpiredOrOrphaned).await;
    assert_eq!(taken.iter().map(|claimed| claimed.claim_no).collect::<Vec<_>>(), [2, 2]);
    assert!(
        claim_as(&store, "s", third, Reclaim::ExpiredOrOrphaned).await.is_empty(),
        "the second lives"
    );
    let sent = || Verdict::Sent { status: Some(200) };
    assert!(!verdict(&store, "s", &lost[0], sent()).await, "the dead one's verdict is late");
    assert!(verdict(&store, "s", &taken[0], sent()).await);
    // An owner that the store has never heard of, or has forgotten, has no lease either.
    store.retire(second).await.unwrap();
    let stranger = claim_as(&store, "s", OwnerId::fresh(), Reclaim::ExpiredOrOrphaned).await;
    assert_eq!(stranger.len(), 1);
    assert_eq!(claim_as(&store, "s", third, Reclaim::ExpiredOrOrphaned).await[0].claim_no, 4);
}

async fn verdict(store: &Tested, sink: &str, claimed: &Claimed, verdict: Verdict) -> bool {
    let ack = Acknowledgement { event_id: claimed.event_id, claim_no: claimed.claim_no, verdict };
    let current = store.acknowledge(sink, Order::None, &[ack]).await.unwrap();
    current == [claimed.event_id]
}

fn dead() -> Verdict {
    Verdict::Dead { status: Some(422), error: "no".into() }
}

/// Status and attempts of each event of a record.
async fn events(store: &Tested, fence: Fence) -> Vec<(EventStatus, u32)> {
    let filter = EventFilter { record: Some(fence.id), limit: 100, ..EventFilter::default() };
    let rows = store.list_events(&filter).await.unwrap();
    rows.into_iter().map(|row| (row.status, row.attempts)).collect()
}

/// Brings a new record to a status and attempt, its retention being over where it is completed.
async fn brought_to(store: &Tested, scope: &Scope, to: Status, attempt: Attempt) -> Fence {
    let (first, owner) = held(store, scope).await;
    let mut fence = first;
    if attempt != Attempt::FIRST {
        assert_eq!(store.mark_unknown(scope, fence).await.unwrap(), Changed::Yes);
        let from = Takeover::Unknown(fence);
        let taken = store.take_over(proposal(scope, owner), from).await.unwrap();
        assert_eq!(taken, Changed::Yes);
        fence.attempt = attempt;
    }
    match to {
        Status::InProgress => {}
        Status::Unknown => {
            assert_eq!(store.mark_unknown(scope, fence).await.unwrap(), Changed::Yes);
        }
        Status::Completed => {
            let over = Completion { retention: Duration::ZERO, ..completion(scope, fence, vec![]) };
            assert!(is_done(complete(store, over).await));
        }
    }
    fence
}

/// Asks for a change; whether the store says that it was made.
async fn made(store: &Tested, scope: &Scope, fence: Fence, change: Change) -> bool {
    match change {
        Change::Complete => is_done(complete(store, completion(scope, fence, vec![])).await),
        Change::Release => store.release(scope, fence).await.unwrap() == Changed::Yes,
        Change::MarkUnknown => store.mark_unknown(scope, fence).await.unwrap() == Changed::Yes,
        Change::Retry => {
            let proposal = proposal(scope, owner(store).await);
            let from = Takeover::Unknown(fence);
            store.take_over(proposal, from).await.unwrap() == Changed::Yes
        }
        Change::LookUp => {
            let proposal = proposal(scope, owner(store).await);
            let from = Takeover::Lookup(fence, NOW, LookupTrigger::Gateway);
            store.take_over(proposal, from).await.unwrap() == Changed::Yes
        }
        Change::NextAttempt => {
            let owner = store.show_record(fence.id).await.unwrap().unwrap().owner;
            store.raise(proposal(scope, owner), fence).await.unwrap() == Changed::Yes
        }
        Change::OperatorComplete => {
            let completion = completion(scope, fence, vec![]);
            store.operator_complete(&completion, &somebody()).await.unwrap().is_ok()
        }
        Change::OperatorRelease => {
            store.operator_release(fence, true, &somebody()).await.unwrap().is_ok()
        }
        Change::Expire => {
            let proposal = proposal(scope, owner(store).await);
            let from = Takeover::Expired(fence);
            store.take_over(proposal, from).await.unwrap() == Changed::Yes
        }
    }
}

async fn each_change_leads_where_the_transition_function_says(store: Tested) {
    let attempts = [Attempt::FIRST, Attempt::FIRST.next()];
    for (from, attempt) in Status::ALL.into_iter().flat_map(|s| attempts.map(|a| (s, a))) {
        for change in Change::ALL {
            let case = format!("{change:?} from {from:?}, attempt {}", attempt.number());
            let scope = scope();
            let fence = brought_to(&store, &scope, from, attempt).await;
            let next = transition(from, attempt, change);
            assert_eq!(made(&store, &scope, fence, change).await, next.is_some(), "{case}");
            let found = store.find(&scope).await.unwrap();
            let stands = found.as_ref().is_some_and(|record| record.fence.id == fence.id);
            assert_eq!(stands, next != Some(Next::Gone), "{case}");
            if let Some(Next::Status(to)) = next {
                assert_eq!(status(&store, &scope).await.map(|(s, _)| s), Some(to), "{case}");
            }
            if next.is_none() {
                let before = Some((from, attempt.number()));
                assert_eq!(status(&store, &scope).await, before, "{case}");
            }
            let again =
                matches!(change, Change::Retry | Change::NextAttempt | Change::OperatorComplete);
            if next.is_some() && again {
                assert_eq!(found.unwrap().fence.attempt, attempt.next(), "{case}");
            } else if next.is_some() && change == Change::LookUp {
                assert_eq!(found.unwrap().fence, fence, "{case}");
            }
        }
    }
}

async fn a_reservation_is_held_once_and_found_by_others(store: Tested) {
    let scope = scope();
    assert_eq!(store.find(&scope).await.unwrap(), None);
    let (fence, first) = held(&store, &scope).await;
    let other = Proposal { fingerprint: fingerprint(2), ..proposal(&scope, owner(&store).await) };
    let Reserved::Exists(found) = store.reserve(other, deadline()).await.unwrap() else {
        panic!("not found")
    };
    assert_eq!(found.fence, fence);
    assert_eq!(found.fingerprint, fingerprint(1), "known from the reservation on");
    assert_eq!(found.caller.as_ref().map(Caller::as_str), Some("alice"));
    assert_eq!(found.state, State::InProgress { owner: first, owner_lives: true });
    assert_eq!(store.find(&scope).await.unwrap(), Some(*found));
    store.retire(first).await.unwrap();
    let found = store.find(&scope).await.unwrap().unwrap();
    assert_eq!(found.state, State::InProgress { owner: first, owner_lives: false });
}

async fn a_record_says_who_asked_for_its_current_attempt(store: Tested) {
    let scope = scope();
    let caller = async || store.find(&scope).await.unwrap().unwrap().caller;
    let by = async |name: Option<&str>| {
        let caller = name.map(str::to_owned);
        Proposal { caller, ..proposal(&scope, owner(&store).await) }
    };
    let bob = || Some(Caller::stored("bob"));
    let first = by(Some("bob")).await;
    let fence = Fence { id: first.id, attempt: Attempt::FIRST };
    assert_eq!(store.reserve(first, deadline()).await.unwrap(), Reserved::Held);
    assert_eq!(caller().await, bob());
    store.mark_unknown(&scope, fence).await.unwrap();
    assert_eq!(caller().await, bob());
    // A question is nobody's; a new attempt is whose it is.
    let question = Takeover::Lookup(fence, NOW, LookupTrigger::Gateway);
    assert_eq!(store.take_over(by(None).await, question).await.unwrap(), Changed::Yes);
    assert_eq!(caller().await, bob());
    store.mark_unknown(&scope, fence).await.unwrap();
    let retry = Takeover::Unknown(fence);
    assert_eq!(store.take_over(by(Some("eve")).await, retry).await.unwrap(), Changed::Yes);
    assert_eq!(caller().await, Some(Caller::stored("eve")));
    let second = Fence { attempt: fence.attempt.next(), ..fence };
    let settled = Completion { retention: Duration::ZERO, ..completion(&scope, second, vec![]) };
    assert!(is_done(complete(&store, settled).await));
    assert_eq!(caller().await, Some(Caller::stored("eve")));
    let expired = Takeover::Expired(second);
    assert_eq!(store.take_over(by(None).await, expired).await.unwrap(), Changed::Yes);
    assert_eq!(caller().await, None);
}

async fn an_own_reservation_proposed_again_is_held(store: Tested) {
    let scope = scope();
    let owner = owner(&store).await;
    let proposal = proposal(&scope, owner);
    for _ in 0..2 {
        let reserved = store.reserve(proposal.clone(), deadline()).await.unwrap();
        assert_eq!(reserved, Reserved::Held);
    }
    store.retire(owner).await.unwrap();
    let reserved = store.reserve(proposal.clone(), deadline()).await.unwrap();
    assert_eq!(reserved, Reserved::Held, "it stands: to say otherwise would leave it behind");
    let filter = RecordFilter {
        tenant: Some(scope.tenant.to_string()),
        limit: 9,
        ..RecordFilter::default()
    };
    assert_eq!(store.list_records(&filter).await.unwrap().len(), 1);
}

async fn without_a_live_lease_nothing_is_reserved_or_taken_over(store: Tested) {
    let ended = OwnerId::fresh();
    store.heartbeat(ended, Duration::ZERO).await.unwrap();
    let retired = owner(&store).await;
    store.retire(retired).await.unwrap();
    for owner in [OwnerId::fresh(), ended, retired] {
        let free = scope();
        let reserved = store.reserve(proposal(&free, owner), deadline()).await.unwrap();
        assert_eq!(reserved, Reserved::LeaseEnded);
        assert_eq!(store.find(&free).await.unwrap(), None);

        let over = scope();
        let from = Takeover::Expired(expired(&store, &over).await);
        assert_eq!(store.take_over(proposal(&over, owner), from).await.unwrap(), Changed::No);

        let lost = scope();
        let fence = brought_to(&store, &lost, Status::Unknown, Attempt::FIRST).await;
        let from = Takeover::Unknown(fence);
        assert_eq!(store.take_over(proposal(&lost, owner), from).await.unwrap(), Changed::No);
        assert_eq!(status(&store, &lost).await, Some((Status::Unknown, 1)));
    }
}

async fn of_many_concurrent_proposals_exactly_one_is_held(store: Tested) {
    let owner = owner(&store).await;
    for _ in 0..5 {
        let scope = scope();
        let proposals = (0..64).map(|_| {
            let (store, proposal) = (Arc::clone(&store), proposal(&scope, owner));
            tokio::spawn(async move {
                (proposal.id, store.reserve(proposal, deadline()).await.unwrap())
            })
        });
        let mut held = Vec::new();
        let mut found = HashSet::new();
        for task in proposals.collect::<Vec<_>>() {
            match task.await.unwrap() {
                (id, Reserved::Held) => held.push(id),
                (_, Reserved::Exists(record)) => drop(found.insert(record.fence.id)),
                (_, other @ (Reserved::Vanished | Reserved::LeaseEnded)) => panic!("{other:?}"),
            }
        }
        assert_eq!(held.len(), 1);
        assert_eq!(found, HashSet::from([held[0]]));
    }
}

async fn tenants_and_operations_do_not_share_keys(store: Tested) {
    let one = scope();
    let other_tenant = Scope { tenant: scope().tenant, ..one.clone() };
    let other_operation =
        Scope { operation: Operation::parse("orders.cancel").unwrap(), ..one.clone() };
    let scopes = [one, other_tenant, other_operation];
    let mut fences = Vec::new();
    for scope in &scopes {
        fences.push(held(&store, scope).await.0);
    }
    for (n, (scope, fence)) in scopes.iter().zip(&fences).enumerate() {
        // Under a scope that is not its own, a fence changes nothing.
        let elsewhere = &scopes[(n + 1) % scopes.len()];
        assert_eq!(store.release(elsewhere, *fence).await.unwrap(), Changed::No);
        assert_eq!(store.mark_unknown(elsewhere, *fence).await.unwrap(), Changed::No);
        let stray = completion(elsewhere, *fence, vec![]);
        assert_eq!(complete(&store, stray).await, Settled::Fenced);
        let mut own = completion(scope, *fence, vec![]);
        own.answer.body = KeptBody::Whole(Bytes::from(format!("for {n}")));
        assert!(is_done(complete(&store, own).await));
    }
    for (n, scope) in scopes.iter().enumerate() {
        let State::Completed(completed) = store.find(scope).await.unwrap().unwrap().state else {
            panic!("not completed")
        };
        assert_eq!(completed.answer.body, KeptBody::Whole(Bytes::from(format!("for {n}"))));
    }
}

async fn a_late_process_changes_nothing(store: Tested) {
    // An earlier attempt, and an earlier id, wake up late.
    let retried = scope();
    let second = brought_to(&store, &retried, Status::InProgress, Attempt::FIRST.next()).await;
    let first = Fence { attempt: Attempt::FIRST, ..second };
    let again = scope();
    let old = expired(&store, &again).await;
    let renewed = proposal(&again, owner(&store).await);
    let new = Fence { id: renewed.id, attempt: Attempt::FIRST };
    let taken = store.take_over(renewed, Takeover::Expired(old)).await.unwrap();
    assert_eq!(taken, Changed::Yes);
    for (scope, late, current) in [(&retried, first, second), (&again, old, new)] {
        let sink = sink();
        let events = vec![event(late, "late", &[&sink])];
        let settled = complete(&store, completion(scope, late, events)).await;
        assert_eq!(settled, Settled::Fenced);
        assert!(claim(&store, &sink, Lane::Fresh, 9, MINUTE).await.is_empty(), "no event either");
        assert_eq!(store.release(scope, late).await.unwrap(), Changed::No);
        assert_eq!(store.mark_unknown(scope, late).await.unwrap(), Changed::No);
        assert_eq!(store.mark_dead(Some((scope, late)), 9).await.unwrap(), 0);
        for from in [Takeover::Unknown(late), Takeover::Expired(late)] {
            let proposal = proposal(scope, owner(&store).await);
            assert_eq!(store.take_over(proposal, from).await.unwrap(), Changed::No);
        }
        let proposal = proposal(scope, owner(&store).await);
        assert_eq!(store.raise(proposal, late).await.unwrap(), Changed::No);
        let record = store.find(scope).await.unwrap().unwrap();
        assert_eq!(record.fence, current);
        assert!(matches!(record.state, State::InProgress { owner_lives: true, .. }));
        assert!(is_done(complete(&store, completion(scope, current, vec![])).await));
    }
}

async fn a_release_forgets_only_the_first_attempt(store: Tested) {
    let scope = scope();
    let (first, _) = held(&store, &scope).await;
    assert_eq!(store.release(&scope, first).await.unwrap(), Changed::Yes);
    assert_eq!(store.find(&scope).await.unwrap(), None);
    assert_eq!(store.release(&scope, first).await.unwrap(), Changed::No);
    let second = brought_to(&store, &scope, Status::InProgress, Attempt::FIRST.next()).await;
    assert_eq!(store.release(&scope, second).await.unwrap(), Changed::Yes);
    let record = store.find(&scope).await.unwrap().unwrap();
    assert_eq!((record.fence, record.state), (second, State::Unknown));
    assert_eq!(record.fingerprint, fingerprint(1));
}

async fn of_many_takeovers_of_an_expired_row_exactly_one_wins(store: Tested) {
    let scope = scope();
    let old = expired(&store, &scope).await;
    let owner = owner(&store).await;
    let Reserved::Exists(found) = store.reserve(proposal(&scope, owner), deadline()).await.unwrap()
    else {
        panic!("not found")
    };
    assert!(matches!(&found.state, State::Completed(c) if c.time_left.is_zero()));
    let takeovers = (0..32).map(|_| {
        let store = Arc::clone(&store);
        let proposal = Proposal { fingerprint: fingerprint(2), ..proposal(&scope, owner) };
        tokio::spawn(async move {
            let id = proposal.id;
            (id, store.take_over(proposal, Takeover::Expired(old)).await.unwrap())
        })
    });
    let mut winners = Vec::new();
    for task in takeovers.collect::<Vec<_>>() {
        let (id, changed) = task.await.unwrap();
        winners.extend((changed == Changed::Yes).then_some(id));
    }
    assert_eq!(winners.len(), 1);
    let record = store.find(&scope).await.unwrap().unwrap();
    assert_eq!(record.fence, Fence { id: winners[0], attempt: Attempt::FIRST });
    assert_eq!(record.fingerprint, fingerprint(2), "it compares nothing");
    let row = store.show_record(winners[0]).await.unwrap().unwrap();
    assert_eq!((row.answer, row.completed_at, row.expires_at), (None, None, None));
}

async fn retention_ends_by_the_databases_clock(store: Tested) {
    let scope = scope();
    let (fence, owner) = held(&store, &scope).await;
    let retention = Duration::from_millis(400);
    let short = Completion { retention, ..completion(&scope, fence, vec![]) };
    let Settled::Done { expires_at } = complete(&store, short).await else { panic!("fenced") };
    let row = store.show_record(fence.id).await.unwrap().unwrap();
    assert_eq!(row.expires_at, Some(expires_at));
    assert_eq!(row.completed_at, Some(expires_at - retention));
    let from = Takeover::Expired(fence);
    let proposal = proposal(&scope, owner);
    happens("the retention ends", SOON, || async {
        let State::Completed(completed) = store.find(&scope).await.unwrap().unwrap().state else {
            panic!("not completed")
        };
        assert_eq!(completed.expires_at, expires_at);
        assert!(completed.time_left <= retention);
        completed.time_left.is_zero()
    })
    .await;
    assert_eq!(store.take_over(proposal, from).await.unwrap(), Changed::Yes);

    let kept = self::scope();
    let (fence, owner) = held(&store, &kept).await;
    assert!(is_done(complete(&store, completion(&kept, fence, vec![])).await));
    let early = self::proposal(&kept, owner);
    let from = Takeover::Expired(fence);
    assert_eq!(store.take_over(early, from).await.unwrap(), Changed::No);
}

async fn a_completion_writes_answer_and_events_once(store: Tested) {
    let scope = scope();
    let (one, two) = (sink(), sink());
    let (fence, _) = held(&store, &scope).await;
    let events = vec![
        event(fence, "order.created", &[&one, &two]),
        Event { position: 1, ..event(fence, "order.audit", &[&one]) },
        Event { position: 2, ..event(fence, "order.ignored", &[]) },
    ];
    let first = completion(&scope, fence, events.clone());
    assert!(is_done(complete(&store, first.clone()).await));
    let mut second = first;
    second.answer.status = StatusCode::OK;
    second.events.push(event(fence, "late", &[&one]));
    assert_eq!(complete(&store, second).await, Settled::Fenced);
    let State::Completed(completed) = store.find(&scope).await.unwrap().unwrap().state else {
        panic!("not completed")
    };
    assert_eq!(completed.answer, answer());
    let row = store.show_record(fence.id).await.unwrap().unwrap();
    assert_eq!(row.context, None, "the request's context is gone with the completion");
    assert_eq!(row.caller.as_deref(), Some("alice"));

    let filter = EventFilter { record: Some(fence.id), limit: 9, ..EventFilter::default() };
    let rows = store.list_events(&filter).await.unwrap();
    let seen: BTreeSet<_> = rows.iter().map(|row| (row.kind.as_str(), row.sink.as_str())).collect();
    let (one, two) = (one.as_str(), two.as_str());
    let owed = [("order.created", one), ("order.created", two), ("order.audit", one)];
    assert_eq!(seen, owed.into_iter().chain([("order.ignored", "")]).collect());
    let ids: HashSet<_> = rows.iter().map(|row| row.id).collect();
    assert_eq!(ids.len(), 3, "each event has its own id");
    for row in &rows {
        let discarded = row.kind == "order.ignored";
        let status = if discarded { EventStatus::Discarded } else { EventStatus::Pending };
        assert_eq!(row.status, status);
        let written = events.iter().find(|event| event.id == row.id).unwrap();
        assert_eq!((&row.payload, &row.event_key), (&written.payload, &written.key));
        assert_eq!((row.record, &row.scope), (fence.id, &scope));
    }
    let claimed = claim(&store, one, Lane::Fresh, 9, MINUTE).await;
    let kinds: Vec<_> = claimed.iter().map(|claimed| claimed.kind.as_str()).collect();
    assert_eq!(kinds, ["order.created", "order.audit"], "in their record's order");
    let Claimed { tenant, operation, key, payload, .. } = &claimed[0];
    assert_eq!(tenant, scope.tenant.as_str());
    assert_eq!(operation, scope.operation.as_str());
    assert_eq!(key, scope.key.as_str());
    assert_eq!(*payload, events[0].payload);
}

async fn an_unknown_attempt_may_still_complete(store: Tested) {
    let scope = scope();
    let fence = brought_to(&store, &scope, Status::Unknown, Attempt::FIRST).await;
    assert!(is_done(complete(&store, completion(&scope, fence, vec![])).await));
    assert_eq!(status(&store, &scope).await, Some((Status::Completed, 1)));
}

async fn only_a_dead_owners_records_are_marked(store: Tested) {
    let (alive, dead, single) = (scope(), scope(), scope());
    let (alive_fence, _) = held(&store, &alive).await;
    let (dead_fence, dead_owner) = held(&store, &dead).await;
    let (single_fence, single_owner) = held(&store, &single).await;
    assert_eq!(store.mark_dead(Some((&alive, alive_fence)), 9).await.unwrap(), 0);
    assert_eq!(store.mark_dead(Some((&single, single_fence)), 9).await.unwrap(), 0);
    store.retire(single_owner).await.unwrap();
    assert_eq!(store.mark_dead(Some((&single, single_fence)), 9).await.unwrap(), 1);
    assert_eq!(store.mark_dead(Some((&single, single_fence)), 9).await.unwrap(), 0);
    store.retire(dead_owner).await.unwrap();
    assert_eq!(store.mark_dead(None, 0).await.unwrap(), 0, "never more than the limit");
    assert_eq!(store.mark_dead(None, 10_000).await.unwrap(), 1);
    assert_eq!(status(&store, &dead).await, Some((Status::Unknown, 1)));
    assert_eq!(status(&store, &single).await, Some((Status::Unknown, 1)));
    assert_eq!(status(&store, &alive).await, Some((Status::InProgress, 1)));
    assert!(is_done(complete(&store, completion(&dead, dead_fence, vec![])).await));
}

/// Takes an unknown record to ask about it, as a new process.
async fn asked(store: &Tested, scope: &Scope, fence: Fence, delay: LookupDelay) -> Changed {
    let by = owner(store).await;
    store
        .take_over(proposal(scope, by), Takeover::Lookup(fence, delay, LookupTrigger::Gateway))
        .await
        .unwrap()
}

async fn due(store: &Tested, delay: LookupDelay, limit: u32) -> Vec<Fence> {
    let operation = scope().operation;
    let due = store.due_lookups(&[LookupRule { operation, delay }], limit).await.unwrap();
    due.into_iter().map(|due| due.fence).collect()
}

async fn an_unknown_record_is_asked_about_by_one_at_a_time(store: Tested) {
    let scope = scope();
    let fence = brought_to(&store, &scope, Status::Unknown, Attempt::FIRST.next()).await;
    let asking = LookupRule { operation: scope.operation.clone(), delay: NOW };
    let found = store.due_lookups(std::slice::from_ref(&asking), 9).await.unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!((&found[0].scope, found[0].fence), (&scope, fence));
    assert_eq!(found[0].fingerprint, fingerprint(1));
    assert_eq!(found[0].caller.as_ref().map(Caller::as_str), Some("alice"));
    assert_eq!(found[0].context.as_deref(), Some(b"{\"n\":1}".as_slice()));
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let (store, scope) = (Arc::clone(&store), scope.clone());
            tokio::spawn(async move { asked(&store, &scope, fence, NOW).await })
        })
        .collect();
    let mut taken = 0;
    for task in tasks {
        taken += usize::from(task.await.unwrap() == Changed::Yes);
    }
    assert_eq!(taken, 1);
    assert_eq!(status(&store, &scope).await, Some((Status::InProgress, 2)), "the same attempt");
    assert!(store.due_lookups(&[asking], 9).await.unwrap().is_empty(), "somebody asks");
    assert_eq!(store.unresolved(fence.id).await.unwrap(), None);
    let row = store.show_record(fence.id).await.unwrap().unwrap();
    assert_eq!(row.context.as_deref(), Some(b"{\"n\":1}".as_slice()), "kept for the events");
    assert!(is_done(complete(&store, completion(&scope, fence, vec![])).await));
    assert!(due(&store, NOW, 9).await.is_empty());
    let dead = OwnerId::fresh();
    let from = Takeover::Lookup(fence, NOW, LookupTrigger::Gateway);
    assert_eq!(store.take_over(proposal(&scope, dead), from).await.unwrap(), Changed::No);
}

async fn a_retry_asks_without_waiting_for_the_next_question(store: Tested) {
    let scope = scope();
    let fence = brought_to(&store, &scope, Status::Unknown, Attempt::FIRST).await;
    assert_eq!(asked(&store, &scope, fence, NOW).await, Changed::Yes);
    store.mark_unknown(&scope, fence).await.unwrap();
    assert_eq!(asked(&store, &scope, fence, NOW).await, Changed::No, "not again at once");
    let by = owner(&store).await;
    let take = async |delay| {
        let from = Takeover::Lookup(fence, delay, LookupTrigger::Retry);
        store.take_over(proposal(&scope, by), from).await.unwrap()
    };
    let later = LookupDelay { after_loss: MINUTE, after_lease: Duration::ZERO };
    assert_eq!(take(later).await, Changed::No, "before it has settled nobody asks");
    let doubt = store.unresolved(fence.id).await.unwrap().unwrap();
    assert_eq!(doubt.context.as_deref(), Some(b"{\"n\":1}".as_slice()));
    assert_eq!(take(NOW).await, Changed::Yes);
    assert_eq!(take(NOW).await, Changed::No, "one at a time");
    assert_eq!(status(&store, &scope).await, Some((Status::InProgress, 1)), "the same attempt");
}

/// Takes an unknown record to ask about it, for a retry.
async fn taken_to_ask(store: &Tested, scope: &Scope, fence: Fence) -> OwnerId {
    let by = owner(store).await;
    let from = Takeover::Lookup(fence, NOW, LookupTrigger::Retry);
    assert_eq!(store.take_over(proposal(scope, by), from).await.unwrap(), Changed::Yes);
    by
}

async fn what_is_asked_about_is_raised_by_whoever_asks_and_nobody_else(store: Tested) {
    let scope = scope();
    let fence = brought_to(&store, &scope, Status::Unknown, Attempt::FIRST).await;
    let next = Fence { attempt: fence.attempt.next(), ..fence };
    let by = taken_to_ask(&store, &scope, fence).await;
    let retry = Proposal {
        fingerprint: fingerprint(9),
        caller: Some("bob".into()),
        context: Some(Bytes::from_static(b"{\"n\":2}")),
        retention: Duration::from_secs(60),
        ..proposal(&scope, by)
    };
    let other = Proposal { owner: owner(&store).await, ..retry.clone() };
    assert_eq!(store.raise(other.clone(), fence).await.unwrap(), Changed::No);
    let elsewhere = Proposal { scope: self::scope(), ..retry.clone() };
    assert_eq!(store.raise(elsewhere, fence).await.unwrap(), Changed::No);
    assert_eq!(store.raise(retry.clone(), next).await.unwrap(), Changed::No);
    assert_eq!(status(&store, &scope).await, Some((Status::InProgress, 1)));
    for again in ["the first time", "after its answer was lost"] {
        assert_eq!(store.raise(retry.clone(), fence).await.unwrap(), Changed::Yes, "{again}");
        let row = store.show_record(fence.id).await.unwrap().unwrap();
        assert_eq!((row.status, row.attempt, row.owner), (Status::InProgress, next.attempt, by));
        assert_eq!(row.caller.as_deref(), Some("bob"));
        assert_eq!(row.context.as_deref(), Some(b"{\"n\":2}".as_slice()));
        assert_eq!(row.fingerprint, fingerprint(1), "of the request that made it");
    }
    assert_eq!(store.raise(other, fence).await.unwrap(), Changed::No);
    // From here on the attempt that was asked about changes nothing any more.
    assert_eq!(complete(&store, completion(&scope, fence, vec![])).await, Settled::Fenced);
    assert_eq!(store.mark_unknown(&scope, fence).await.unwrap(), Changed::No);
    // Not sent, it leaves the doubt about the one before.
    assert_eq!(store.release(&scope, next).await.unwrap(), Changed::Yes);
    assert_eq!(store.raise(retry.clone(), fence).await.unwrap(), Changed::No);
    assert_eq!(store.raise(retry, next).await.unwrap(), Changed::No, "nobody holds it");
    assert_eq!(status(&store, &scope).await, Some((Status::Unknown, 2)));
}

async fn what_ended_while_it_was_asked_about_is_not_raised(store: Tested) {
    // Its answer came after all.
    let (answered, left, dead) = (scope(), scope(), scope());
    let fence = brought_to(&store, &answered, Status::Unknown, Attempt::FIRST).await;
    let by = taken_to_ask(&store, &answered, fence).await;
    assert!(is_done(complete(&store, completion(&answered, fence, vec![])).await));
    assert_eq!(store.raise(proposal(&answered, by), fence).await.unwrap(), Changed::No);
    assert_eq!(status(&store, &answered).await, Some((Status::Completed, 1)));
    // Somebody put it back, and somebody else asks by now.
    let fence = brought_to(&store, &left, Status::Unknown, Attempt::FIRST).await;
    let by = taken_to_ask(&store, &left, fence).await;
    assert_eq!(store.mark_unknown(&left, fence).await.unwrap(), Changed::Yes);
    assert_eq!(store.raise(proposal(&left, by), fence).await.unwrap(), Changed::No);
    taken_to_ask(&store, &left, fence).await;
    assert_eq!(store.raise(proposal(&left, by), fence).await.unwrap(), Changed::No);
    assert_eq!(status(&store, &left).await, Some((Status::InProgress, 1)));
    // The asker's lease has run out, noticed or not.
    let fence = brought_to(&store, &dead, Status::Unknown, Attempt::FIRST).await;
    let by = taken_to_ask(&store, &dead, fence).await;
    store.retire(by).await.unwrap();
    assert_eq!(store.raise(proposal(&dead, by), fence).await.unwrap(), Changed::No);
    assert_eq!(status(&store, &dead).await, Some((Status::InProgress, 1)));
}

async fn a_doubt_begins_when_the_outcome_is_lost_and_goes_on_through_questions(store: Tested) {
    let scope = scope();
    let (mut fence, by) = held(&store, &scope).await;
    assert_eq!(store.unresolved(fence.id).await.unwrap(), None);
    store.mark_unknown(&scope, fence).await.unwrap();
    let first = store.unresolved(fence.id).await.unwrap().unwrap();
    assert_eq!((first.asked, first.orphaned), (0, false));
    assert_eq!(first.next_ask_at, first.since);
    assert_eq!(asked(&store, &scope, fence, NOW).await, Changed::Yes);
    assert_eq!(store.mark_unknown(&scope, fence).await.unwrap(), Changed::Yes);
    let second = store.unresolved(fence.id).await.unwrap().unwrap();
    assert_eq!((second.asked, second.since), (1, first.since), "a question is no new doubt");
    let pause = second.next_ask_at.duration_since(second.since).unwrap();
    assert!(pause >= Duration::from_millis(500), "{pause:?}");
    assert_eq!(asked(&store, &scope, fence, NOW).await, Changed::No, "not again at once");
    assert!(due(&store, NOW, 9).await.is_empty());
    // A later attempt that is known not to have executed leaves the doubt about the one before.
    let taken = store.take_over(proposal(&scope, by), Takeover::Unknown(fence)).await.unwrap();
    assert_eq!(taken, Changed::Yes);
    fence.attempt = fence.attempt.next();
    store.release(&scope, fence).await.unwrap();
    let third = store.unresolved(fence.id).await.unwrap().unwrap();
    assert_eq!((third.asked, third.since), (2, first.since));
    // One that may have executed is a doubt of its own. The clocks of both stores count milliseconds.
    store.take_over(proposal(&scope, by), Takeover::Unknown(fence)).await.unwrap();
    fence.attempt = fence.attempt.next();
    happens("time passes", SOON, async || {
        third.since.elapsed().unwrap() > Duration::from_millis(5)
    })
    .await;
    store.mark_unknown(&scope, fence).await.unwrap();
    let last = store.unresolved(fence.id).await.unwrap().unwrap();
    assert_eq!((last.asked, last.next_ask_at), (0, last.since));
    assert!(last.since > first.since);
}

async fn the_upstream_is_left_alone_until_it_has_settled(store: Tested) {
    let (lost, orphaned) = (scope(), scope());
    let lost_fence = brought_to(&store, &lost, Status::Unknown, Attempt::FIRST).await;
    let (orphan_fence, by) = held(&store, &orphaned).await;
    store.retire(by).await.unwrap();
    assert_eq!(store.mark_dead(None, 9).await.unwrap(), 1);
    assert!(store.unresolved(orphan_fence.id).await.unwrap().unwrap().orphaned);
    let only_after_loss = LookupDelay { after_loss: Duration::ZERO, after_lease: MINUTE };
    let only_after_lease = LookupDelay { after_loss: MINUTE, after_lease: Duration::ZERO };
    assert_eq!(due(&store, only_after_loss, 9).await, [lost_fence]);
    assert_eq!(due(&store, only_after_lease, 9).await, [orphan_fence]);
    assert_eq!(due(&store, NOW, 9).await, [lost_fence, orphan_fence]);
    assert_eq!(due(&store, NOW, 1).await, [lost_fence], "the one that waits longest");
    for (scope, fence, no, yes) in [
        (&lost, lost_fence, only_after_lease, only_after_loss),
        (&orphaned, orphan_fence, only_after_loss, only_after_lease),
    ] {
        assert_eq!(asked(&store, scope, fence, no).await, Changed::No);
        assert_eq!(asked(&store, scope, fence, yes).await, Changed::Yes);
    }
    // Whoever asked dies: it is asked about later, and the doubt goes on.
    let since = |doubt: Option<oncegate::store::Unresolved>| doubt.unwrap().since;
    let scope = self::scope();
    let (fence, by) = held(&store, &scope).await;
    store.mark_unknown(&scope, fence).await.unwrap();
    let before = since(store.unresolved(fence.id).await.unwrap());
    let from = Takeover::Lookup(fence, NOW, LookupTrigger::Gateway);
    assert_eq!(store.take_over(proposal(&scope, by), from).await.unwrap(), Changed::Yes);
    store.retire(by).await.unwrap();
    assert_eq!(store.mark_dead(Some((&scope, fence)), 9).await.unwrap(), 1);
    let after = store.unresolved(fence.id).await.unwrap().unwrap();
    assert_eq!((after.since, after.asked, after.orphaned), (before, 1, false));
    let other = LookupRule { operation: Operation::parse("other").unwrap(), delay: NOW };
    assert!(store.due_lookups(&[other], 9).await.unwrap().is_empty());
    assert!(store.due_lookups(&[], 9).await.unwrap().is_empty());
}

async fn an_ended_lease_is_never_renewed(store: Tested) {
    let owner = OwnerId::fresh();
    assert_eq!(store.heartbeat(owner, MINUTE).await.unwrap(), Heartbeat::Renewed);
    assert_eq!(store.heartbeat(owner, Duration::ZERO).await.unwrap(), Heartbeat::Renewed);
    assert_eq!(store.heartbeat(owner, MINUTE).await.unwrap(), Heartbeat::Ended);
    let retired = self::owner(&store).await;
    store.retire(retired).await.unwrap();
    store.sweep_leases().await.unwrap();
    assert_eq!(store.heartbeat(retired, MINUTE).await.unwrap(), Heartbeat::Ended);
    let short = OwnerId::fresh();
    store.heartbeat(short, Duration::from_millis(20)).await.unwrap();
    let probe = scope();
    happens("the lease ends by itself", SOON, || async {
        match store.reserve(proposal(&probe, short), deadline()).await.unwrap() {
            Reserved::LeaseEnded => true,
            Reserved::Held | Reserved::Exists(_) | Reserved::Vanished => {
                let fence = store.find(&probe).await.unwrap().unwrap().fence;
                store.release(&probe, fence).await.unwrap();
                false
            }
        }
    })
    .await;
    assert_eq!(store.heartbeat(short, MINUTE).await.unwrap(), Heartbeat::Ended);
}

async fn sweeps_leave_everything_that_is_not_over(store: Tested) {
    let (running, lost, kept, over) = (scope(), scope(), scope(), scope());
    let (_, owner) = held(&store, &running).await;
    store.retire(owner).await.unwrap();
    brought_to(&store, &lost, Status::Unknown, Attempt::FIRST).await;
    let (fence, _) = held(&store, &kept).await;
    assert!(is_done(complete(&store, completion(&kept, fence, vec![])).await));
    expired(&store, &over).await;
    assert_eq!(store.sweep_records(0).await.unwrap(), 0);
    store.sweep_records(10_000).await.unwrap();
    assert_eq!(store.find(&over).await.unwrap(), None);
    for left in [&running, &lost, &kept] {
        assert!(store.find(left).await.unwrap().is_some());
    }

    let sink = sink();
    let names = ["sent", "owed", "dead", "half"];
    let (_, fence) = announced(&store, &sink, &names).await;
    for claimed in claim(&store, &sink, Lane::Fresh, 9, MINUTE).await {
        match claimed.kind.as_str() {
            "sent" => {
                assert!(
                    verdict(&store, &sink, &claimed, Verdict::Sent { status: Some(200) }).await
                );
            }
            "dead" => assert!(verdict(&store, &sink, &claimed, dead()).await),
            _ => {}
        }
    }
    store.sweep_events(MINUTE, 10_000).await.unwrap();
    assert_eq!(events(&store, fence).await.len(), names.len(), "the retention is not over");
    happens("the sent event goes", SOON, || async {
        store.sweep_events(Duration::ZERO, 10_000).await.unwrap();
        events(&store, fence).await.len() == names.len() - 1
    })
    .await;
    let left: Vec<_> = events(&store, fence).await.into_iter().map(|(status, _)| status).collect();
    assert_eq!(left.iter().filter(|status| **status == EventStatus::Pending).count(), 2);
    assert_eq!(left.iter().filter(|status| **status == EventStatus::Dead).count(), 1);
}

async fn a_late_delivery_stays_visible_for_its_whole_retention(store: Tested) {
    // Fault 53: one sink is done long ago, the other has only just ended.
    let (quick, slow) = (sink(), sink());
    let scope = scope();
    let (fence, _) = held(&store, &scope).await;
    let events = vec![event(fence, "made", &[&quick, &slow])];
    assert!(is_done(complete(&store, completion(&scope, fence, events)).await));
    let retention = Duration::from_millis(300);
    let claimed = claim(&store, &quick, Lane::Fresh, 1, MINUTE).await;
    assert!(verdict(&store, &quick, &claimed[0], Verdict::Sent { status: Some(200) }).await);
    let sent = Instant::now();
    happens("the first is past its retention", SOON, || async { sent.elapsed() > retention }).await;
    store.sweep_events(retention, 10_000).await.unwrap();
    assert_eq!(self::events(&store, fence).await.len(), 2, "the other one is owed");
    let claimed = claim(&store, &slow, Lane::Fresh, 1, MINUTE).await;
    let ending = Instant::now();
    assert!(verdict(&store, &slow, &claimed[0], Verdict::Sent { status: Some(200) }).await);
    store.sweep_events(retention, 10_000).await.unwrap();
    let left = self::events(&store, fence).await.len();
    // On a machine that stood still meanwhile, it may rightly be gone.
    assert!(left == 2 || ending.elapsed() >= retention, "it ended only now");
    happens("both go", SOON, || async {
        store.sweep_events(Duration::ZERO, 10_000).await.unwrap();
        self::events(&store, fence).await.is_empty()
    })
    .await;
}

async fn an_event_that_is_dead_towards_one_sink_is_kept_whole(store: Tested) {
    let (taken, refused, probe) = (sink(), sink(), sink());
    let scope = scope();
    let (fence, _) = held(&store, &scope).await;
    let events = vec![event(fence, "made", &[&taken, &refused])];
    assert!(is_done(complete(&store, completion(&scope, fence, events)).await));
    let claimed = claim(&store, &taken, Lane::Fresh, 1, MINUTE).await;
    assert!(verdict(&store, &taken, &claimed[0], Verdict::Sent { status: Some(200) }).await);
    let claimed = claim(&store, &refused, Lane::Fresh, 1, MINUTE).await;
    assert!(verdict(&store, &refused, &claimed[0], dead()).await);
    // Another event that ended later shows that the sweep got this far.
    let (_, later) = announced(&store, &probe, &["probe"]).await;
    let claimed = claim(&store, &probe, Lane::Fresh, 1, MINUTE).await;
    assert!(verdict(&store, &probe, &claimed[0], Verdict::Sent { status: Some(200) }).await);
    happens("the later event goes", SOON, || async {
        store.sweep_events(Duration::ZERO, 10_000).await.unwrap();
        self::events(&store, later).await.is_empty()
    })
    .await;
    assert_eq!(self::events(&store, fence).await.len(), 2);
}

async fn a_claim_takes_no_more_than_its_limit_and_nothing_twice(store: Tested) {
    let sink = sink();
    announced(&store, &sink, &["a", "b", "c", "d", "e"]).await;
    assert!(claim(&store, &sink, Lane::Retry, 9, MINUTE).await.is_empty(), "they are fresh");
    assert!(claim(&store, &sink, Lane::Fresh, 0, MINUTE).await.is_empty());
    let first = claim(&store, &sink, Lane::Fresh, 2, MINUTE).await;
    let second = claim(&store, &sink, Lane::Fresh, 2, MINUTE).await;
    let third = claim(&store, &sink, Lane::Fresh, 9, Duration::ZERO).await;
    let sizes = [first.len(), second.len(), third.len()];
    assert_eq!(sizes, [2, 2, 1]);
    let all = first.iter().chain(&second).chain(&third);
    assert_eq!(all.map(|claimed| claimed.event_id).collect::<HashSet<_>>().len(), 5);
    let again = claim(&store, &sink, Lane::Fresh, 9, MINUTE).await;
    assert_eq!(again.len(), 1, "only the claim whose lease is over");
    assert_eq!(again[0].event_id, third[0].event_id);
    assert!(again[0].claim_no > third[0].claim_no);
    assert_eq!(again[0].attempts, 0);
}

/// Writes events of one record, in this order, each with its ordering key.
async fn announced_in_order(store: &Tested, sink: &str, names: &[(&str, Option<&str>)]) -> Fence {
    let scope = scope();
    let (fence, _) = held(store, &scope).await;
    let events = names.iter().enumerate().map(|(n, (name, key))| Event {
        position: u16::try_from(n).unwrap(),
        ordering_key: key.map(str::to_owned),
        ..event(fence, name, &[sink])
    });
    let completion = completion(&scope, fence, events.collect());
    assert!(is_done(complete(store, completion).await));
    fence
}

const FREE: Order = Order::Key(OnDead::Free);
const BLOCK: Order = Order::Key(OnDead::Block);

/// All that is due of a lane, in that order.
async fn in_order(store: &Tested, sink: &str, lane: Lane, order: Order) -> Vec<Claimed> {
    let (owner, reclaim) = (OwnerId::fresh(), Reclaim::Expired);
    let sink = sink.to_owned();
    let claim =
        Claim { sink, lane, order, limit: 9, owner, lease: MINUTE, reclaim, look: Look::Complete };
    store.claim(&claim).await.unwrap()
}

fn names(claimed: &[Claimed]) -> Vec<&str> {
    claimed.iter().map(|claimed| claimed.kind.as_str()).collect()
}

async fn say(store: &Tested, sink: &str, order: Order, claimed: &Claimed, verdict: Verdict) {
    let ack = Acknowledgement { event_id: claimed.event_id, claim_no: claimed.claim_no, verdict };
    let current = store.acknowledge(sink, order, &[ack]).await.unwrap();
    assert_eq!(current, [claimed.event_id]);
}

async fn of_one_ordering_key_one_event_is_claimed_and_its_verdict_wakes_the_next(store: Tested) {
    let sink = sink();
    let events =
        [("a", Some("k")), ("b", Some("k")), ("c", Some("k")), ("x", Some("l")), ("y", None)];
    announced_in_order(&store, &sink, &events).await;
    let claim = |lane| in_order(&store, &sink, lane, FREE);
    let sent = || Verdict::Sent { status: Some(200) };
    let again = |delay| Verdict::Retry { delay, status: None, error: "x".into() };
    let first = claim(Lane::Fresh).await;
    assert_eq!(names(&first), ["a", "x", "y"]);
    assert!(claim(Lane::Fresh).await.is_empty(), "the others wait");

    say(&store, &sink, FREE, &first[0], again(Duration::ZERO)).await;
    assert!(claim(Lane::Fresh).await.is_empty(), "nothing overtakes what is tried again");
    let retried = claim(Lane::Retry).await;
    assert_eq!(names(&retried), ["a"]);
    say(&store, &sink, FREE, &retried[0], Verdict::GivenBack).await;
    assert!(claim(Lane::Fresh).await.is_empty(), "nor what is given back");
    let retried = claim(Lane::Retry).await;
    say(&store, &sink, FREE, &retried[0], sent()).await;
    let second = claim(Lane::Fresh).await;
    assert_eq!(names(&second), ["b"], "the next is due at once");

    let one = Chosen::One { id: first[0].event_id, sink: None };
    assert_eq!(store.redeliver(&one, &somebody()).await.unwrap().count, 1);
    assert!(claim(Lane::Retry).await.is_empty(), "never two of a key at once");
    say(&store, &sink, FREE, &second[0], again(MINUTE)).await;
    assert!(claim(Lane::Fresh).await.is_empty());
    let older = claim(Lane::Retry).await;
    assert_eq!(names(&older), ["a"], "the oldest is woken, whoever gave up the turn");
    let (b, by) = (Chosen::One { id: second[0].event_id, sink: None }, somebody());
    say(&store, &sink, FREE, &older[0], dead()).await;
    assert_eq!(store.redeliver(&b, &by).await.unwrap().count, 1, "due at once");
    let second = claim(Lane::Retry).await;
    assert_eq!(names(&second), ["b"], "a dead one frees its key");
    say(&store, &sink, FREE, &second[0], sent()).await;
    assert_eq!(names(&claim(Lane::Fresh).await), ["c"]);
}

async fn a_dead_event_blocks_its_ordering_key_where_that_is_asked_for(store: Tested) {
    let sink = sink();
    let events = [("a", Some("k")), ("b", Some("k")), ("x", Some("l")), ("y", Some("l"))];
    let fence = announced_in_order(&store, &sink, &events).await;
    let first = in_order(&store, &sink, Lane::Fresh, BLOCK).await;
    assert_eq!(names(&first), ["a", "x"]);
    for claimed in &first {
        say(&store, &sink, BLOCK, claimed, dead()).await;
    }
    assert!(in_order(&store, &sink, Lane::Fresh, BLOCK).await.is_empty(), "they wait");
    assert_eq!(store.gauges().await.unwrap().blocked, [(sink.clone(), 2)]);
    let filter = EventFilter { record: Some(fence.id), limit: 9, ..EventFilter::default() };
    let rows = store.list_events(&filter).await.unwrap();
    let blocking: BTreeSet<_> =
        rows.iter().filter(|row| row.blocks).map(|row| row.kind.as_str()).collect();
    assert_eq!(blocking, BTreeSet::from(["a", "x"]), "it is visible");

    let one = Chosen::One { id: first[0].event_id, sink: None };
    assert_eq!(store.redeliver(&one, &somebody()).await.unwrap().count, 1);
    let again = in_order(&store, &sink, Lane::Retry, BLOCK).await;
    assert_eq!(names(&again), ["a"]);
    say(&store, &sink, BLOCK, &again[0], Verdict::Sent { status: Some(200) }).await;
    let next = in_order(&store, &sink, Lane::Fresh, BLOCK).await;
    assert_eq!(names(&next), ["b"], "the other key still waits");
    // By an operator's request the follower is looked at anew; where dead ones free their key, nothing holds it.
    let y = rows.iter().find(|row| row.kind == "y").unwrap();
    let one = Chosen::One { id: y.id, sink: None };
    assert_eq!(store.redeliver(&one, &somebody()).await.unwrap().count, 1);
    assert!(in_order(&store, &sink, Lane::Fresh, BLOCK).await.is_empty());
    assert_eq!(store.redeliver(&one, &somebody()).await.unwrap().count, 1);
    assert_eq!(names(&in_order(&store, &sink, Lane::Fresh, FREE).await), ["y"]);
    assert!(store.gauges().await.unwrap().blocked.is_empty());
}

async fn the_turn_of_a_claim_that_is_over_goes_to_the_same_event(store: Tested) {
    let sink = sink();
    announced_in_order(&store, &sink, &[("a", Some("k")), ("b", Some("k"))]).await;
    let (lost, heir) = (owner(&store).await, owner(&store).await);
    let (lane, order) = (Lane::Fresh, FREE);
    let claim = |owner, lease, reclaim| {
        let sink = sink.clone();
        Claim { sink, lane, order, limit: 9, owner, lease, reclaim, look: Look::Quick }
    };
    let short = store.claim(&claim(lost, Duration::ZERO, Reclaim::Expired)).await.unwrap();
    let long = store.claim(&claim(lost, MINUTE, Reclaim::Expired)).await.unwrap();
    assert_eq!((names(&short), names(&long)), (vec!["a"], vec!["a"]));
    assert!(
        store.claim(&claim(heir, MINUTE, Reclaim::ExpiredOrOrphaned)).await.unwrap().is_empty()
    );
    store.retire(lost).await.unwrap();
    assert!(store.claim(&claim(heir, MINUTE, Reclaim::Expired)).await.unwrap().is_empty());
    let taken = store.claim(&claim(heir, MINUTE, Reclaim::ExpiredOrOrphaned)).await.unwrap();
    assert_eq!((names(&taken), taken[0].claim_no), (vec!["a"], 3));
    let late = Acknowledgement {
        event_id: long[0].event_id,
        claim_no: long[0].claim_no,
        verdict: Verdict::Sent { status: Some(200) },
    };
    assert!(store.acknowledge(&sink, FREE, &[late]).await.unwrap().is_empty());
    assert!(in_order(&store, &sink, Lane::Fresh, FREE).await.is_empty(), "it gave up nothing");
}

async fn concurrent_claims_never_share_an_event(store: Tested) {
    let sink = sink();
    let names: Vec<_> = (0..60).map(|n| format!("e{n}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    announced(&store, &sink, &names).await;
    let workers = (0..8).map(|_| {
        let (store, sink) = (Arc::clone(&store), sink.clone());
        tokio::spawn(async move {
            let mut mine = Vec::new();
            loop {
                let claimed = claim(&store, &sink, Lane::Fresh, 3, MINUTE).await;
                assert!(claimed.len() <= 3);
                if claimed.is_empty() {
                    return mine;
                }
                mine.extend(claimed.into_iter().map(|claimed| claimed.event_id));
            }
        })
    });
    let mut all = Vec::new();
    for worker in workers.collect::<Vec<_>>() {
        all.extend(worker.await.unwrap());
    }
    // A claim may pass over rows that another one holds just now; what is left is claimed at the end.
    all.extend(claim(&store, &sink, Lane::Fresh, 99, MINUTE).await.iter().map(|c| c.event_id));
    assert_eq!(all.len(), names.len());
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), names.len());
}

async fn a_stale_acknowledgement_changes_nothing(store: Tested) {
    let sink = sink();
    let (_, fence) = announced(&store, &sink, &["a"]).await;
    let stale = claim(&store, &sink, Lane::Fresh, 1, Duration::ZERO).await.remove(0);
    let current = claim(&store, &sink, Lane::Fresh, 1, MINUTE).await.remove(0);
    let retry = Verdict::Retry { delay: Duration::ZERO, status: None, error: "x".into() };
    for late in [Verdict::Sent { status: Some(200) }, retry, dead(), Verdict::GivenBack] {
        assert!(!verdict(&store, &sink, &stale, late).await);
    }
    assert!(!verdict(&store, "another sink", &current, dead()).await);
    assert_eq!(events(&store, fence).await, [(EventStatus::Pending, 0)]);
    assert!(claim(&store, &sink, Lane::Fresh, 1, MINUTE).await.is_empty(), "still leased");
    assert!(verdict(&store, &sink, &current, Verdict::Sent { status: Some(200) }).await);
    assert_eq!(events(&store, fence).await, [(EventStatus::Sent, 1)]);
    assert!(!verdict(&store, &sink, &current, dead()).await, "it has ended");
}

async fn verdicts_move_events_as_they_say(store: Tested) {
    let sink = sink();
    let (_, fence) = announced(&store, &sink, &["a"]).await;
    let first = claim(&store, &sink, Lane::Fresh, 1, MINUTE).await.remove(0);
    assert!(verdict(&store, &sink, &first, Verdict::GivenBack).await);
    assert_eq!(events(&store, fence).await, [(EventStatus::Pending, 0)], "no attempt is used");
    let second = claim(&store, &sink, Lane::Fresh, 1, MINUTE).await.remove(0);
    assert!(second.claim_no > first.claim_no);
    let retry = |delay| Verdict::Retry { delay, status: Some(500), error: "häß".into() };
    assert!(verdict(&store, &sink, &second, retry(Duration::ZERO)).await);
    assert!(claim(&store, &sink, Lane::Fresh, 1, MINUTE).await.is_empty(), "now a retry");
    let third = claim(&store, &sink, Lane::Retry, 1, MINUTE).await.remove(0);
    assert_eq!((third.attempts, third.event_id), (1, first.event_id));
    assert!(verdict(&store, &sink, &third, retry(MINUTE)).await);
    assert!(claim(&store, &sink, Lane::Retry, 1, MINUTE).await.is_empty(), "not due yet");
    let filter = EventFilter { record: Some(fence.id), limit: 9, ..EventFilter::default() };
    let row = store.list_events(&filter).await.unwrap().remove(0);
    assert_eq!(row.last_error.as_deref(), Some("häß"));
    assert_eq!((row.attempts, row.sent_at), (2, None));
    assert!(row.next_attempt_at.is_some_and(|next| next > row.created_at));
    let one = Chosen::One { id: row.id, sink: Some(sink.clone()) };
    assert_eq!(store.redeliver(&one, &somebody()).await.unwrap().count, 1, "due at once");
    let fourth = claim(&store, &sink, Lane::Retry, 1, MINUTE).await.remove(0);
    assert!(verdict(&store, &sink, &fourth, dead()).await);
    let row = store.list_events(&filter).await.unwrap().remove(0);
    assert_eq!((row.status, row.attempts), (EventStatus::Dead, 3));
    assert_eq!((row.last_error.as_deref(), row.sent_at), (Some("no"), None));
    let gauges = store.gauges().await.unwrap();
    assert!(gauges.dead.contains(&(sink.clone(), 1)));
    assert!(gauges.pending.iter().all(|(pending, ..)| *pending != sink));
}

async fn redelivery_goes_on_from_the_claim_number(store: Tested) {
    let sink = sink();
    let (_, fence) = announced(&store, &sink, &["dead", "sent", "leased"]).await;
    let claimed = claim(&store, &sink, Lane::Fresh, 9, MINUTE).await;
    let of = |kind: &str| claimed.iter().find(|claimed| claimed.kind == kind).unwrap();
    assert!(verdict(&store, &sink, of("dead"), dead()).await);
    assert!(verdict(&store, &sink, of("sent"), Verdict::Sent { status: Some(204) }).await);
    let by = somebody();
    let leased = Chosen::One { id: of("leased").event_id, sink: None };
    assert_eq!(store.redeliver(&leased, &by).await.unwrap().count, 0, "it is on its way");
    let all = Chosen::Dead(DeadFilter { sink: Some(sink.clone()), ..DeadFilter::default() });
    assert_eq!(store.redeliver(&all, &by).await.unwrap().count, 1);
    assert_eq!(store.redeliver(&all, &by).await.unwrap().count, 0, "once");
    let sent = Chosen::One { id: of("sent").event_id, sink: None };
    assert_eq!(store.redeliver(&sent, &by).await.unwrap().count, 1);
    let nobody = Chosen::One { id: Uuid::new_v4(), sink: None };
    assert_eq!(store.redeliver(&nobody, &by).await.unwrap().count, 0);
    assert!(claim(&store, &sink, Lane::Fresh, 9, MINUTE).await.is_empty(), "the retry lane");
    let again = claim(&store, &sink, Lane::Retry, 9, MINUTE).await;
    assert_eq!(again.len(), 2);
    for claimed in &again {
        let before = of(&claimed.kind);
        assert_eq!(claimed.event_id, before.event_id);
        assert_eq!(claimed.attempts, 0);
        assert!(claimed.claim_no > before.claim_no + 1, "the number goes on");
        assert!(!verdict(&store, &sink, before, dead()).await, "an old worker changes nothing");
        assert!(verdict(&store, &sink, claimed, Verdict::Sent { status: Some(200) }).await);
    }
    let audit = store.audit_of(fence.id).await.unwrap();
    let events: Vec<_> = audit.iter().filter_map(|row| row.event).collect();
    assert_eq!(events, [of("dead").event_id, of("sent").event_id]);
    assert!(audit.iter().all(|row| row.action == "event.redeliver" && row.who == "olga"));
}

async fn redelivery_leaves_those_alone_who_took_it_unless_it_is_asked_for(store: Tested) {
    let sinks = [sink(), sink(), sink(), sink()];
    let [taken, dead_there, owed, held] = &sinks;
    let scope = scope();
    let (fence, _) = self::held(&store, &scope).await;
    let names: Vec<&str> = sinks.iter().map(String::as_str).collect();
    let event = event(fence, "a", &names);
    let id = event.id;
    assert!(is_done(complete(&store, completion(&scope, fence, vec![event])).await));
    for (sink, end) in [
        (taken, Some(Verdict::Sent { status: Some(200) })),
        (dead_there, Some(dead())),
        (held, None),
    ] {
        let claimed = claim(&store, sink, Lane::Fresh, 1, MINUTE).await.remove(0);
        if let Some(end) = end {
            assert!(verdict(&store, sink, &claimed, end).await);
        }
    }
    let by = somebody();
    let touched = async |which| {
        let Touched { count, mut sinks } = store.redeliver(&which, &by).await.unwrap();
        assert_eq!(count, sinks.len() as u64);
        sinks.sort_by(|one, other| one.0.cmp(&other.0));
        sinks
    };
    let mut wanted =
        vec![(dead_there.clone(), EventStatus::Dead), (owed.clone(), EventStatus::Pending)];
    wanted.sort_by(|one, other| one.0.cmp(&other.0));
    assert_eq!(touched(Chosen::NotTaken { id }).await, wanted);
    assert!(claim(&store, taken, Lane::Retry, 9, MINUTE).await.is_empty(), "it took it");
    assert_eq!(claim(&store, dead_there, Lane::Retry, 9, MINUTE).await.len(), 1);
    assert_eq!(claim(&store, owed, Lane::Fresh, 9, MINUTE).await.len(), 1);
    assert_eq!(touched(Chosen::NotTaken { id }).await, [], "the rest is in flight");
    let again = vec![(taken.clone(), EventStatus::Sent)];
    assert_eq!(touched(Chosen::One { id, sink: None }).await, again);
    assert_eq!(claim(&store, taken, Lane::Retry, 9, MINUTE).await.len(), 1);
    let audit = store.audit_of(fence.id).await.unwrap();
    assert_eq!(audit.len(), 3, "a row for each of them");
}

async fn what_is_done_to_all_dead_events_is_told_of_each_of_their_records(store: Tested) {
    let (sink, kinds) = (sink(), ["a", "b"]);
    let mut fences = Vec::new();
    for _ in 0..2 {
        fences.push(announced(&store, &sink, &kinds).await.1);
    }
    let die = async |lane, count| {
        let claimed = claim(&store, &sink, lane, 9, MINUTE).await;
        assert_eq!(claimed.len(), count);
        for claimed in &claimed {
            assert!(verdict(&store, &sink, claimed, dead()).await);
        }
    };
    die(Lane::Fresh, 4).await;
    let told = async |fence: Fence| -> Vec<_> {
        let audit = store.audit_of(fence.id).await.unwrap();
        for row in &audit {
            assert_eq!((row.who.as_str(), row.record), ("olga", Some(fence.id)));
            let detail: serde_json::Value =
                serde_json::from_str(row.detail.as_deref().unwrap()).unwrap();
            assert_eq!(
                (&detail["sink"], &detail["status"]),
                (&sink.clone().into(), &"dead".into())
            );
            assert!(detail["among"]["count"].as_u64() >= Some(2), "{detail}");
        }
        audit.into_iter().map(|row| (row.action, row.event.unwrap())).collect()
    };
    let of = |kind: Option<&str>| {
        let kind = kind.map(str::to_owned);
        Chosen::Dead(DeadFilter { sink: Some(sink.clone()), kind, ..DeadFilter::default() })
    };
    let by = somebody();
    assert_eq!(store.redeliver(&of(None), &by).await.unwrap(), Touched { count: 4, sinks: vec![] });
    die(Lane::Retry, 4).await;
    assert_eq!(store.discard(&of(Some("a")), &by).await.unwrap().count, 2);
    for fence in &fences {
        let (again, up) = ("event.redeliver".to_owned(), "event.discard".to_owned());
        let ids = kinds.map(|kind| event(*fence, kind, &[]).id);
        let mut first = ids.map(|id| (again.clone(), id)).to_vec();
        first.sort();
        first.push((up, ids[0]));
        assert_eq!(told(*fence).await, first);
    }
    // It goes with the event.
    assert_eq!(store.discard(&of(None), &by).await.unwrap().count, 2);
    happens("they are over", SOON, async || {
        store.sweep_events(Duration::ZERO, 10).await.unwrap();
        told(fences[0]).await.is_empty() && told(fences[1]).await.is_empty()
    })
    .await;
}

/// How many became due, and that there is no more.
async fn wake_deferred(store: &Tested, sink: &str, order: Order) -> u64 {
    let Woken { count, next } = store.wake_deferred(sink, order, None).await.unwrap();
    assert_eq!(next, None);
    count
}

async fn what_an_order_kept_back_goes_once_it_is_no_longer_asked_for(store: Tested) {
    let sink = sink();
    let of = |name, key| (name, Some(key));
    let events =
        [of("a", "k"), of("b", "k"), of("c", "k"), of("d", "l"), of("e", "l"), of("f", "l")];
    announced_in_order(&store, &sink, &events).await;
    let after = |delay| Verdict::Retry { delay, status: None, error: "x".into() };
    let again = || after(MINUTE);
    // "a" pauses, with two behind it. "d" and "e" died, "f" failed; then "d" and "e" were redelivered, "d" pauses, and the
    // others wait for it.
    let first = in_order(&store, &sink, Lane::Fresh, FREE).await;
    assert_eq!(names(&first), ["a", "d"]);
    say(&store, &sink, FREE, &first[0], again()).await;
    say(&store, &sink, FREE, &first[1], dead()).await;
    let e = in_order(&store, &sink, Lane::Fresh, FREE).await;
    assert_eq!(names(&e), ["e"]);
    say(&store, &sink, FREE, &e[0], dead()).await;
    let f = in_order(&store, &sink, Lane::Fresh, FREE).await;
    assert_eq!(names(&f), ["f"]);
    say(&store, &sink, FREE, &f[0], after(Duration::ZERO)).await;
    let all = Chosen::Dead(DeadFilter { sink: Some(sink.clone()), ..DeadFilter::default() });
    assert_eq!(store.redeliver(&all, &somebody()).await.unwrap().count, 2);
    let d = in_order(&store, &sink, Lane::Retry, FREE).await;
    assert_eq!(names(&d), ["d"]);
    say(&store, &sink, FREE, &d[0], again()).await;

    for order in [FREE, BLOCK] {
        assert_eq!(wake_deferred(&store, &sink, order).await, 0, "they wait for others");
    }
    let both = async |order| {
        let mut all = in_order(&store, &sink, Lane::Fresh, order).await;
        all.extend(in_order(&store, &sink, Lane::Retry, order).await);
        names(&all).into_iter().map(str::to_owned).collect::<BTreeSet<_>>()
    };
    assert_eq!(both(FREE).await, BTreeSet::new());
    assert_eq!(wake_deferred(&store, &sink, Order::None).await, 4);
    assert_eq!(both(Order::None).await, BTreeSet::from(["b", "c", "e", "f"].map(str::to_owned)));
    assert_eq!(
        wake_deferred(&store, &sink, Order::None).await,
        0,
        "\"a\" and \"d\" pause as they did"
    );
}

async fn what_waits_for_nobody_is_woken(store: Tested) {
    let fresh = async |sink: &str, order| in_order(&store, sink, Lane::Fresh, order).await;
    // A relay without an order, as a replica of an older configuration is, wakes nobody.
    let mixed = sink();
    announced_in_order(&store, &mixed, &[("x", Some("k")), ("y", Some("k"))]).await;
    let both = claim(&store, &mixed, Lane::Fresh, 2, MINUTE).await;
    let of = |kind: &str| both.iter().find(|claimed| claimed.kind == kind).unwrap();
    assert!(verdict(&store, &mixed, of("y"), Verdict::GivenBack).await);
    assert!(fresh(&mixed, BLOCK).await.is_empty());
    assert_eq!(wake_deferred(&store, &mixed, BLOCK).await, 0, "it waits for the first");
    assert!(verdict(&store, &mixed, of("x"), Verdict::Sent { status: Some(200) }).await);
    assert!(fresh(&mixed, BLOCK).await.is_empty(), "it is deferred");
    assert_eq!(wake_deferred(&store, &mixed, BLOCK).await, 1);
    assert_eq!(names(&fresh(&mixed, BLOCK).await), ["y"]);

    // What blocked its key may not do so any more.
    let blocked = sink();
    let fence = announced_in_order(&store, &blocked, &[("a", Some("k")), ("b", Some("k"))]).await;
    let a = fresh(&blocked, BLOCK).await.remove(0);
    say(&store, &blocked, BLOCK, &a, dead()).await;
    assert!(fresh(&blocked, BLOCK).await.is_empty());
    assert_eq!(wake_deferred(&store, &blocked, BLOCK).await, 0, "as it is configured");
    assert!(fresh(&blocked, BLOCK).await.is_empty());
    assert_eq!(wake_deferred(&store, &blocked, FREE).await, 1);
    assert_eq!(store.gauges().await.unwrap().blocked, []);
    let filter = EventFilter { record: Some(fence.id), limit: 9, ..EventFilter::default() };
    assert!(store.list_events(&filter).await.unwrap().iter().all(|row| !row.blocks));
    assert_eq!(names(&fresh(&blocked, FREE).await), ["b"]);
    assert_eq!(wake_deferred(&store, &blocked, FREE).await, 0, "it is in flight");

    // Who has the turn is waited for, also by what stands before it.
    let turn = sink();
    announced_in_order(&store, &turn, &[("m", Some("k")), ("n", Some("k"))]).await;
    let m = fresh(&turn, FREE).await.remove(0);
    say(&store, &turn, FREE, &m, dead()).await;
    assert_eq!(names(&fresh(&turn, FREE).await), ["n"]);
    let again = Chosen::NotTaken { id: m.event_id };
    assert_eq!(store.redeliver(&again, &somebody()).await.unwrap().count, 1);
    assert!(in_order(&store, &turn, Lane::Retry, FREE).await.is_empty());
    assert_eq!(wake_deferred(&store, &turn, FREE).await, 0);
}

/// How a sink stands; `None`: it was never paused.
async fn sink_state(store: &Tested, sink: &str, reclaim: Reclaim) -> Option<SinkState> {
    store.sinks(reclaim).await.unwrap().into_iter().find(|state| state.sink == sink)
}

async fn reason(store: &Tested, sink: &str) -> Option<PauseReason> {
    sink_state(store, sink, Reclaim::Expired)
        .await
        .and_then(|state| state.pause)
        .map(|pause| pause.reason)
}

fn failing(again: Duration) -> Trouble {
    Trouble::Failing { again }
}

fn pausing(trouble: Trouble) -> SinkChange {
    SinkChange::Pause { trouble, error: "500: h\0äß".into(), failed_probes: 0 }
}

fn probing(owner: OwnerId) -> SinkChange {
    SinkChange::Probe { owner, lease: MINUTE, reclaim: Reclaim::ExpiredOrOrphaned }
}

async fn changed_sink(store: &Tested, sink: &str, no: i64, change: &SinkChange) -> bool {
    store.change_sink(sink, no, change).await.unwrap() == Changed::Yes
}

async fn a_sink_is_paused_once_and_resumed_by_its_probe(store: Tested) {
    let sink = &sink();
    let me = owner(&store).await;
    assert_eq!(sink_state(&store, sink, Reclaim::Expired).await, None);
    for change in [probing(me), SinkChange::Resume, SinkChange::ProbeIdle { again: MINUTE }] {
        assert!(!changed_sink(&store, sink, 0, &change).await, "it is open: {change:?}");
    }
    assert!(!changed_sink(&store, sink, 1, &pausing(failing(MINUTE))).await, "nobody has seen a 1");

    // Many replicas have seen enough at the same time.
    let pauses = (0..4).map(|_| {
        let (store, sink) = (Arc::clone(&store), sink.clone());
        tokio::spawn(async move { changed_sink(&store, &sink, 0, &pausing(failing(SOON))).await })
    });
    let mut paused = 0;
    for pause in pauses.collect::<Vec<_>>() {
        paused += usize::from(pause.await.unwrap());
    }
    assert_eq!(paused, 1);
    let state = sink_state(&store, sink, Reclaim::Expired).await.unwrap();
    let pause = state.pause.unwrap();
    assert_eq!((state.no, pause.reason, pause.failed_probes), (1, PauseReason::Failing, 0));
    let error = state.last_error.unwrap();
    assert!(error.starts_with("500: h") && error.ends_with("äß"), "{error}");
    let waits = matches!(pause.probe, NextProbe::In(wait) if wait <= SOON && wait > SOON / 2);
    assert!(waits, "{pause:?}");
    assert!(!changed_sink(&store, sink, 1, &probing(me)).await, "it is not time");
    assert!(!changed_sink(&store, sink, 1, &SinkChange::Resume).await, "nobody has probed it");

    let other = &self::sink();
    assert!(changed_sink(&store, other, 0, &pausing(failing(Duration::ZERO))).await);
    assert!(changed_sink(&store, other, 1, &probing(me)).await);
    assert!(
        !changed_sink(&store, other, 1, &SinkChange::Resume).await,
        "the number before the probe"
    );
    assert!(changed_sink(&store, other, 2, &SinkChange::Resume).await);
    let state = sink_state(&store, other, Reclaim::Expired).await.unwrap();
    assert_eq!((state.no, state.pause), (3, None));
    assert!(!changed_sink(&store, other, 0, &pausing(failing(MINUTE))).await, "a late failure");
    assert!(changed_sink(&store, other, 3, &pausing(failing(MINUTE))).await);
    assert_eq!(
        reason(&store, sink).await,
        Some(PauseReason::Failing),
        "the first one stays as it is"
    );
}

async fn one_probes_a_sink_at_a_time_and_a_late_probe_changes_nothing(store: Tested) {
    let sink = &sink();
    let (first, second) = (owner(&store).await, owner(&store).await);
    assert!(changed_sink(&store, sink, 0, &pausing(failing(Duration::ZERO))).await);
    assert!(changed_sink(&store, sink, 1, &probing(first)).await);
    let probe = |state: &SinkState| state.pause.as_ref().unwrap().probe;
    let under_way =
        |probe| matches!(probe, NextProbe::UnderWay { over_in } if over_in > MINUTE / 2);
    let state = sink_state(&store, sink, Reclaim::ExpiredOrOrphaned).await.unwrap();
    assert!(under_way(probe(&state)), "{state:?}");
    assert!(!changed_sink(&store, sink, 2, &probing(second)).await, "the first one probes");

    let error = "503".to_owned();
    let failed = SinkChange::ProbeFailed { trouble: failing(Duration::ZERO), error };
    assert!(changed_sink(&store, sink, 2, &failed).await);
    assert!(!changed_sink(&store, sink, 2, &SinkChange::Resume).await, "it has ended");
    let state = sink_state(&store, sink, Reclaim::Expired).await.unwrap();
    let pause = state.pause.as_ref().unwrap();
    assert_eq!((state.no, pause.failed_probes), (3, 1));
    assert_eq!(state.last_error.as_deref(), Some("503"));

    // A prober that dies: its probe is free once its lease has ended, for those who may take its owner for dead.
    assert!(changed_sink(&store, sink, 3, &probing(second)).await);
    store.retire(second).await.unwrap();
    let patient = SinkChange::Probe { owner: first, lease: MINUTE, reclaim: Reclaim::Expired };
    assert!(!changed_sink(&store, sink, 4, &patient).await, "who may not judge waits");
    let state = sink_state(&store, sink, Reclaim::ExpiredOrOrphaned).await.unwrap();
    assert_eq!(probe(&state), NextProbe::In(Duration::ZERO));
    let patient = sink_state(&store, sink, Reclaim::Expired).await.unwrap();
    assert!(under_way(probe(&patient)), "{patient:?}");
    assert!(changed_sink(&store, sink, 4, &probing(first)).await);
    assert!(
        !changed_sink(&store, sink, 4, &SinkChange::Resume).await,
        "the dead one's answer is late"
    );
    assert!(changed_sink(&store, sink, 5, &SinkChange::ProbeIdle { again: MINUTE }).await);
    let state = sink_state(&store, sink, Reclaim::Expired).await.unwrap();
    assert_eq!(state.pause.as_ref().unwrap().failed_probes, 1, "nothing was sent");
    assert_eq!(state.last_error.as_deref(), Some("503"));
    assert!(matches!(probe(&state), NextProbe::In(wait) if wait > MINUTE / 2), "{state:?}");

    // A probe that met a sink that wants to be left alone has failed, too.
    let busy = &self::sink();
    assert!(changed_sink(&store, busy, 0, &pausing(Trouble::Busy { again: Duration::ZERO })).await);
    assert!(changed_sink(&store, busy, 1, &probing(first)).await);
    let trouble = Trouble::Busy { again: Duration::ZERO };
    let failed = SinkChange::ProbeFailed { trouble, error: "429".into() };
    assert!(changed_sink(&store, busy, 2, &failed).await);
    let pause = sink_state(&store, busy, Reclaim::Expired).await.unwrap().pause.unwrap();
    assert_eq!((pause.reason, pause.failed_probes), (PauseReason::Busy, 1));
}

async fn a_pause_by_an_operator_or_of_a_sink_that_is_gone_is_not_probed(store: Tested) {
    let (sink, gone) = (&sink(), &self::sink());
    let (me, by) = (owner(&store).await, somebody());
    assert!(changed_sink(&store, gone, 0, &pausing(Trouble::Gone)).await);
    assert!(!changed_sink(&store, gone, 1, &probing(me)).await);
    let order = async |sink: &str, order| store.operate_sink(sink, order, &by).await.unwrap();
    assert_eq!(order(sink, SinkOrder::Resume).await, Changed::No, "it is open");
    // In the middle of a probe, which then changes nothing.
    assert!(changed_sink(&store, sink, 0, &pausing(failing(Duration::ZERO))).await);
    assert!(changed_sink(&store, sink, 1, &probing(me)).await);
    assert_eq!(order(sink, SinkOrder::Pause).await, Changed::Yes);
    let met = sink_state(&store, sink, Reclaim::Expired).await.unwrap().last_error;
    assert!(met.is_some_and(|met| met.contains("500")), "it is not forgotten");
    assert_eq!(order(sink, SinkOrder::Pause).await, Changed::No, "it is paused by hand");
    let failed = SinkChange::ProbeFailed { trouble: failing(Duration::ZERO), error: "x".into() };
    for change in [SinkChange::Resume, failed, probing(me), pausing(failing(Duration::ZERO))] {
        for no in [2, 3] {
            assert!(!changed_sink(&store, sink, no, &change).await, "{change:?}");
        }
    }
    for (sink, why, note) in
        [(sink, PauseReason::Operator, Some("asked the bank")), (gone, PauseReason::Gone, None)]
    {
        let pause = sink_state(&store, sink, Reclaim::Expired).await.unwrap().pause.unwrap();
        let said = (pause.reason, pause.probe, pause.note.as_deref());
        assert_eq!(said, (why, NextProbe::Never, note));
        assert_eq!(order(sink, SinkOrder::Resume).await, Changed::Yes);
        assert_eq!(reason(&store, sink).await, None);
    }
    let no = sink_state(&store, sink, Reclaim::Expired).await.unwrap().no;
    assert!(changed_sink(&store, sink, no, &pausing(Trouble::Busy { again: MINUTE })).await);
    assert_eq!(reason(&store, sink).await, Some(PauseReason::Busy));
}

async fn what_a_sink_met_last_is_known_until_it_is_given_up_and_then(store: Tested) {
    let sink = sink();
    announced(&store, &sink, &["a", "b"]).await;
    let met = async || store.last_failure(&sink).await.unwrap();
    assert_eq!(met().await, None);
    let claimed = claim(&store, &sink, Lane::Fresh, 2, MINUTE).await;
    let dies = |error: &str| Verdict::Dead { status: Some(500), error: error.into() };
    assert!(verdict(&store, &sink, &claimed[0], dies("first")).await);
    assert_eq!(met().await.as_deref(), Some("first"));
    let again = Verdict::Retry { delay: Duration::ZERO, status: None, error: "again".into() };
    assert!(verdict(&store, &sink, &claimed[1], again).await);
    assert_eq!(met().await.as_deref(), Some("again"), "what is still owed");
    let retried = claim(&store, &sink, Lane::Retry, 1, MINUTE).await.remove(0);
    assert!(verdict(&store, &sink, &retried, dies("last")).await);
    assert_eq!(met().await.as_deref(), Some("last"));
}

async fn what_is_given_back_keeps_its_attempts_and_says_what_it_met(store: Tested) {
    let sink = sink();
    let (_, fence) = announced(&store, &sink, &["a", "b"]).await;
    let back = |delay| Verdict::Returned { delay, status: Some(429), error: "later".into() };
    let first = claim(&store, &sink, Lane::Fresh, 1, MINUTE).await.remove(0);
    assert!(verdict(&store, &sink, &first, back(Duration::ZERO)).await);
    assert_eq!(events(&store, fence).await, [(EventStatus::Pending, 0); 2]);
    assert_eq!(store.last_failure(&sink).await.unwrap().as_deref(), Some("later"));
    let again = claim(&store, &sink, Lane::Retry, 1, MINUTE).await.remove(0);
    assert_eq!((again.event_id, again.attempts, again.refusals), (first.event_id, 0, 0));
    // A refusal is an attempt, and is counted beside it.
    let refused = Verdict::Refused { delay: Duration::ZERO, status: Some(422), error: "no".into() };
    assert!(verdict(&store, &sink, &again, refused).await);
    let again = claim(&store, &sink, Lane::Retry, 1, MINUTE).await.remove(0);
    assert_eq!((again.attempts, again.refusals), (1, 1));
    assert!(verdict(&store, &sink, &again, back(Duration::ZERO)).await);

    // What goes back goes behind what is due: another one comes first.
    let other = claim(&store, &sink, Lane::Fresh, 1, MINUTE).await.remove(0);
    assert!(verdict(&store, &sink, &other, back(Duration::ZERO)).await);
    tick().await;
    let next = claim(&store, &sink, Lane::Retry, 1, MINUTE).await.remove(0);
    assert_eq!((next.event_id, next.refusals), (first.event_id, 1));
    assert!(verdict(&store, &sink, &next, back(Duration::ZERO)).await);
    assert_eq!(claim(&store, &sink, Lane::Retry, 1, MINUTE).await[0].event_id, other.event_id);
    let next = claim(&store, &sink, Lane::Retry, 1, MINUTE).await.remove(0);
    assert!(verdict(&store, &sink, &next, back(MINUTE)).await);
    assert!(claim(&store, &sink, Lane::Retry, 9, MINUTE).await.is_empty(), "not due yet");
    // Redelivered, it begins anew.
    let row = Chosen::One { id: next.event_id, sink: Some(sink.clone()) };
    assert_eq!(store.redeliver(&row, &somebody()).await.unwrap().count, 1);
    let next = claim(&store, &sink, Lane::Retry, 1, MINUTE).await.remove(0);
    assert!(verdict(&store, &sink, &next, dead()).await);
    assert_eq!(store.redeliver(&row, &somebody()).await.unwrap().count, 1);
    let anew = claim(&store, &sink, Lane::Retry, 1, MINUTE).await.remove(0);
    assert_eq!((anew.attempts, anew.refusals), (0, 0));
}

/// What is kept of an event's attempts: which, and how it ended.
async fn attempts(store: &Tested, event: Uuid) -> Vec<(u32, Option<u16>, Option<String>)> {
    let rows = store.attempts_of(event).await.unwrap();
    assert!(rows.is_sorted_by_key(|row| (row.claim_no, row.at)), "{rows:?}");
    rows.into_iter()
        .map(|AttemptRow { attempt, status, error, .. }| (attempt, status, error))
        .collect()
}

async fn each_failed_attempt_under_a_current_claim_is_kept(store: Tested) {
    let sink = sink();
    announced(&store, &sink, &["a"]).await;
    let retry =
        || Verdict::Retry { delay: Duration::ZERO, status: Some(500), error: "häß".into() };
    let failed = |n, status, error: &str| (n, Some(status), Some(error.to_owned()));
    let stale = claim(&store, &sink, Lane::Fresh, 1, Duration::ZERO).await.remove(0);
    let id = stale.event_id;
    let first = claim(&store, &sink, Lane::Fresh, 1, MINUTE).await.remove(0);
    assert!(!verdict(&store, &sink, &stale, dead()).await);
    assert!(!verdict(&store, &sink, &stale, retry()).await);
    assert!(verdict(&store, &sink, &first, Verdict::GivenBack).await);
    assert_eq!(attempts(&store, id).await, [], "late ones and what is given back are no attempts");

    let first = claim(&store, &sink, Lane::Fresh, 1, MINUTE).await.remove(0);
    assert!(verdict(&store, &sink, &first, retry()).await);
    let second = claim(&store, &sink, Lane::Retry, 1, MINUTE).await.remove(0);
    assert!(verdict(&store, &sink, &second, dead()).await);
    assert!(!verdict(&store, &sink, &second, retry()).await, "it has ended");
    let both = [failed(1, 500, "häß"), failed(2, 422, "no")];
    assert_eq!(attempts(&store, id).await, both);

    let again = Chosen::One { id, sink: None };
    assert_eq!(store.redeliver(&again, &somebody()).await.unwrap().count, 1);
    assert_eq!(attempts(&store, id).await, both, "a redelivery forgets nothing");
    for so_far in [3, 4] {
        let anew = claim(&store, &sink, Lane::Retry, 1, MINUTE).await.remove(0);
        assert!(verdict(&store, &sink, &anew, Verdict::Sent { status: Some(202) }).await);
        let rows = attempts(&store, id).await;
        assert_eq!((rows.len(), rows.last()), (so_far, Some(&(1, Some(202), None))));
        assert_eq!(store.redeliver(&again, &somebody()).await.unwrap().count, 1);
        assert_eq!(attempts(&store, id).await, rows, "nor that it was taken once");
    }
    let at: Vec<_> = store.attempts_of(id).await.unwrap().iter().map(|row| row.at).collect();
    assert!(at.is_sorted(), "{at:?}");
}

async fn no_more_attempts_than_fifty_are_kept_and_they_go_with_their_event(store: Tested) {
    let sink = sink();
    let (_, fence) = announced(&store, &sink, &["a", "other"]).await;
    let claimed = claim(&store, &sink, Lane::Fresh, 2, MINUTE).await;
    let retry =
        |n: u32| Verdict::Retry { delay: Duration::ZERO, status: None, error: n.to_string() };
    let (mut one, other) = (claimed[0].clone(), claimed[1].clone());
    for n in 1..=53 {
        assert!(verdict(&store, &sink, &one, retry(n)).await);
        one = claim(&store, &sink, Lane::Retry, 1, MINUTE).await.remove(0);
    }
    let rows = attempts(&store, one.event_id).await;
    let kept: Vec<_> = rows.iter().map(|(n, _, error)| (*n, error.clone().unwrap())).collect();
    let newest: Vec<_> = (4..=53).map(|n: u32| (n, n.to_string())).collect();
    assert_eq!(kept, newest, "the newest");
    assert_eq!(u32::try_from(kept.len()).unwrap(), ATTEMPTS_KEPT);

    assert!(verdict(&store, &sink, &other, retry(1)).await);
    assert!(verdict(&store, &sink, &one, Verdict::Sent { status: Some(200) }).await);
    happens("the delivered one is over", SOON, async || {
        store.sweep_events(Duration::ZERO, 10).await.unwrap() == 1
    })
    .await;
    assert_eq!(attempts(&store, one.event_id).await, []);
    assert_eq!(attempts(&store, other.event_id).await.len(), 1, "those of others stay");
    assert_eq!(events(&store, fence).await, [(EventStatus::Pending, 1)]);
}

async fn a_discarded_event_is_over_and_what_is_sent_or_in_flight_is_left_alone(store: Tested) {
    let sink = sink();
    let kinds = ["dead", "sent", "leased", "pending", "failed"];
    let (_, fence) = announced(&store, &sink, &kinds).await;
    let claimed = claim(&store, &sink, Lane::Fresh, 9, MINUTE).await;
    let of = |kind: &str| claimed.iter().find(|claimed| claimed.kind == kind).unwrap();
    let retry = Verdict::Retry { delay: Duration::ZERO, status: Some(500), error: "x".into() };
    assert!(verdict(&store, &sink, of("dead"), dead()).await);
    assert!(verdict(&store, &sink, of("sent"), Verdict::Sent { status: Some(204) }).await);
    assert!(verdict(&store, &sink, of("pending"), Verdict::GivenBack).await);
    assert!(verdict(&store, &sink, of("failed"), retry.clone()).await);
    let by = somebody();
    for (kind, count) in [("dead", 1), ("sent", 0), ("leased", 0), ("pending", 1), ("failed", 1)] {
        let elsewhere = Chosen::One { id: of(kind).event_id, sink: Some("another".into()) };
        assert_eq!(store.discard(&elsewhere, &by).await.unwrap().count, 0, "{kind}");
        let one = Chosen::One { id: of(kind).event_id, sink: None };
        assert_eq!(store.discard(&one, &by).await.unwrap().count, count, "{kind}");
        assert_eq!(store.discard(&one, &by).await.unwrap().count, 0, "{kind}: once");
    }
    let filter = EventFilter { record: Some(fence.id), limit: 9, ..EventFilter::default() };
    for row in store.list_events(&filter).await.unwrap() {
        let wanted = match row.kind.as_str() {
            "sent" => (EventStatus::Sent, 1, None),
            "leased" => (EventStatus::Pending, 0, None),
            "dead" => (EventStatus::Discarded, 1, Some("no")),
            "failed" => (EventStatus::Discarded, 1, Some("x")),
            _ => (EventStatus::Discarded, 0, None),
        };
        assert_eq!((row.status, row.attempts, row.last_error.as_deref()), wanted, "{}", row.kind);
    }
    for lane in [Lane::Fresh, Lane::Retry] {
        assert!(claim(&store, &sink, lane, 9, MINUTE).await.is_empty(), "nothing is owed");
    }
    assert!(verdict(&store, &sink, of("leased"), Verdict::Sent { status: Some(200) }).await);
    let audit = store.audit_of(fence.id).await.unwrap();
    let noted: Vec<_> = audit.iter().filter_map(|row| row.event).collect();
    assert_eq!(noted, ["dead", "pending", "failed"].map(|kind| of(kind).event_id));
    assert!(audit.iter().all(|row| row.action == "event.discard" && row.who == "olga"));

    // It may still be sent by name, under a number that no late worker has.
    let id = of("failed").event_id;
    let any = Chosen::One { id, sink: None };
    assert_eq!(store.redeliver(&any, &by).await.unwrap().count, 0, "it was given up");
    let named = Chosen::One { id, sink: Some(sink.clone()) };
    assert_eq!(store.redeliver(&named, &by).await.unwrap().count, 1);
    let anew = claim(&store, &sink, Lane::Retry, 9, MINUTE).await.remove(0);
    assert!(anew.claim_no > of("failed").claim_no + 1 && anew.attempts == 0, "{anew:?}");
    assert!(!verdict(&store, &sink, of("failed"), retry).await);
}

async fn dead_events_are_chosen_by_what_they_are(store: Tested) {
    let (this, that) = (sink(), sink());
    let mut tenants = Vec::new();
    for sink in [&this, &that] {
        let (scope, _) = announced(&store, sink, &["a", "b", "alive"]).await;
        for claimed in claim(&store, sink, Lane::Fresh, 9, MINUTE).await {
            let end = if claimed.kind == "alive" { Verdict::GivenBack } else { dead() };
            assert!(verdict(&store, sink, &claimed, end).await);
        }
        tenants.push(scope.tenant.to_string());
    }
    let all = DeadFilter::default;
    for (filter, count) in [
        (all(), 4),
        (DeadFilter { sink: Some(this.clone()), ..all() }, 2),
        (DeadFilter { kind: Some("a".into()), ..all() }, 2),
        (DeadFilter { tenant: Some(tenants[1].clone()), ..all() }, 2),
        (DeadFilter { operation: Some("orders.create".into()), ..all() }, 4),
        (DeadFilter { operation: Some("none".into()), ..all() }, 0),
        (DeadFilter { since: Some(MINUTE), ..all() }, 4),
        (DeadFilter { since: Some(Duration::ZERO), ..all() }, 0),
        (DeadFilter { sink: Some(this.clone()), kind: Some("b".into()), ..all() }, 1),
    ] {
        assert_eq!(store.count_dead(&filter).await.unwrap(), count, "{filter:?}");
    }
    let by = somebody();
    let b = DeadFilter { sink: Some(this.clone()), kind: Some("b".into()), ..all() };
    assert_eq!(store.discard(&Chosen::Dead(b), &by).await.unwrap().count, 1);
    let of_this = DeadFilter { tenant: Some(tenants[0].clone()), ..all() };
    assert_eq!(store.redeliver(&Chosen::Dead(of_this), &by).await.unwrap().count, 1);
    let due = claim(&store, &this, Lane::Retry, 9, MINUTE).await;
    assert_eq!(due.iter().map(|claimed| claimed.kind.as_str()).collect::<Vec<_>>(), ["a"]);
    assert!(claim(&store, &that, Lane::Retry, 9, MINUTE).await.is_empty());
    assert_eq!(store.count_dead(&all()).await.unwrap(), 2, "the other sink's");
}

async fn the_next_due_event_is_known(store: Tested) {
    let sink = sink();
    assert_eq!(store.next_due(&sink).await.unwrap(), None);
    announced(&store, &sink, &["a", "b"]).await;
    let claimed = claim(&store, &sink, Lane::Fresh, 9, 5 * MINUTE).await;
    let within = |due: Option<Duration>, most: Duration| {
        due.is_some_and(|due| due <= most && due > most - MINUTE)
    };
    assert!(within(store.next_due(&sink).await.unwrap(), 5 * MINUTE), "the end of the claims");
    let delay = 2 * MINUTE;
    let retry = Verdict::Retry { delay, status: None, error: "x".into() };
    assert!(verdict(&store, &sink, &claimed[0], retry).await);
    assert!(within(store.next_due(&sink).await.unwrap(), delay), "a retry");
    assert!(verdict(&store, &sink, &claimed[1], Verdict::Sent { status: Some(200) }).await);
    assert!(within(store.next_due(&sink).await.unwrap(), delay));
}

async fn answers_come_back_byte_for_byte(store: Tested) {
    let every_byte: Vec<u8> = (0..=255).collect();
    let mut headers = HeaderMap::new();
    for link in ["<a>; rel=next, <b>", "", "<c>"] {
        headers.append("link", HeaderValue::from_static(link));
    }
    headers.append("x-raw", HeaderValue::from_bytes(b"caf\xe9 \x80\xff").unwrap());
    let large = Bytes::from(vec![0xa5; 1 << 20]);
    for (status, headers, body) in [
        (204, HeaderMap::new(), KeptBody::Whole(Bytes::new())),
        (201, headers.clone(), KeptBody::Whole(Bytes::from(every_byte))),
        (299, HeaderMap::new(), KeptBody::Whole(Bytes::from_static(b"\0"))),
        (599, headers.clone(), KeptBody::NotRetained),
        (200, headers, KeptBody::Whole(large)),
    ] {
        let spelling = Spelling::of(&headers, ["Link", "X-Raw", "link", "LINK"]);
        assert_eq!(spelling.is_plain(), headers.is_empty());
        let answer =
            Answer { status: StatusCode::from_u16(status).unwrap(), headers, spelling, body };
        let scope = scope();
        let (fence, owner) = held(&store, &scope).await;
        let kept = Completion { answer: answer.clone(), ..completion(&scope, fence, vec![]) };
        assert!(is_done(complete(&store, kept).await));
        let found = store.find(&scope).await.unwrap().unwrap();
        let State::Completed(completed) = &found.state else { panic!("not completed") };
        assert_eq!(completed.answer, answer);
        assert!(!completed.time_left.is_zero());
        let Reserved::Exists(met) =
            store.reserve(proposal(&scope, owner), deadline()).await.unwrap()
        else {
            panic!("not found")
        };
        assert!(matches!(met.state, State::Completed(met) if met.answer == answer));
        let shown = store.show_record(fence.id).await.unwrap().unwrap();
        assert_eq!(shown.answer, Some(answer));
    }
}

async fn operators_resolve_only_what_nobody_works_on(store: Tested) {
    let by = somebody();
    let sink = sink();
    let nowhere = Fence { id: RecordId::fresh(), attempt: Attempt::FIRST };
    let missing = store.operator_release(nowhere, true, &by).await.unwrap();
    assert_eq!(missing, Err(Objection::NotFound));

    let scope = scope();
    let (fence, owner) = held(&store, &scope).await;
    let created_at = store.show_record(fence.id).await.unwrap().unwrap().created_at;
    let running = Err(Objection::Running { owner, since: created_at });
    let resolved = completion(&scope, fence, vec![event(fence, "made", &[&sink])]);
    assert_eq!(store.operator_release(fence, false, &by).await.unwrap(), running);
    assert_eq!(store.operator_complete(&resolved, &by).await.unwrap(), running);
    assert!(store.audit_of(fence.id).await.unwrap().is_empty());
    store.retire(owner).await.unwrap();
    assert_eq!(store.operator_complete(&resolved, &by).await.unwrap(), Ok(()));
    assert_eq!(status(&store, &scope).await, Some((Status::Completed, 2)));
    assert_eq!(claim(&store, &sink, Lane::Fresh, 9, MINUTE).await.len(), 1, "its events, too");
    assert_eq!(complete(&store, resolved.clone()).await, Settled::Fenced, "the attempt is over");

    let now = Fence { attempt: Attempt::FIRST.next(), ..fence };
    let moved = store.operator_release(fence, true, &by).await.unwrap();
    assert_eq!(moved, Err(Objection::Moved));
    let completed = store.operator_release(now, false, &by).await.unwrap();
    assert_eq!(completed, Err(Objection::IsCompleted));
    let again = Completion { fence: now, ..resolved };
    let completed = store.operator_complete(&again, &by).await.unwrap();
    assert_eq!(completed, Err(Objection::IsCompleted));
    assert_eq!(store.operator_release(now, true, &by).await.unwrap(), Ok(()));
    assert_eq!(store.find(&scope).await.unwrap(), None);

    let audit = store.audit_of(fence.id).await.unwrap();
    let actions: Vec<_> = audit.iter().map(|row| row.action.as_str()).collect();
    assert_eq!(actions, ["record.complete", "record.release"]);
    for row in &audit {
        assert_eq!((row.who.as_str(), row.why.as_deref()), ("olga", Some("asked the bank")));
        assert_eq!((row.record, row.event), (Some(fence.id), None));
        assert!(row.at >= created_at);
    }
    let acted_on = store.acted_on(MINUTE).await.unwrap();
    assert_eq!(acted_on.iter().filter(|id| **id == fence.id).count(), 1);
    assert_eq!(store.ping().await.map_err(|error| error.to_string()), Ok(()));
}

async fn a_late_outcome_is_noted_once_with_all_of_it(store: Tested) {
    let scope = scope();
    let (fence, _) = held(&store, &scope).await;
    let second = Fence { attempt: fence.attempt.next(), ..fence };
    let completed = LateOutcome::from(&completion(&scope, fence, vec![event(fence, "made", &[])]));
    let not_sent = LateOutcome { scope: scope.clone(), fence: second, end: LateEnd::NotSent };
    for late in [&completed, &completed, &not_sent, &completed] {
        store.note_late_outcome(late).await.unwrap();
    }
    let audit = store.audit_of(fence.id).await.unwrap();
    assert_eq!(audit.len(), 2, "each attempt's once");
    for late in [completed, not_sent] {
        let row = audit.iter().find(|row| row.id == late.id()).unwrap();
        assert_eq!((row.who.as_str(), row.action.as_str()), ("gateway", "late_outcome"));
        assert_eq!((row.record, row.event), (Some(fence.id), None));
        assert_eq!(row.why.as_deref(), Some(late.summary().as_str()));
        let detail: serde_json::Value =
            serde_json::from_str(row.detail.as_deref().unwrap()).unwrap();
        assert_eq!(detail, late.detail());
    }
    assert_eq!(store.acted_on(MINUTE).await.unwrap(), [], "no operator acted");
    let row = store.show_record(fence.id).await.unwrap().unwrap();
    assert_eq!(
        (row.status, row.attempt),
        (Status::InProgress, fence.attempt),
        "it changes nothing"
    );
}

/// The one doubt that has not been told.
async fn unannounced(store: &Tested) -> Notice {
    let mut untold = store.unannounced(Unannounced::All, 9).await.unwrap();
    assert_eq!(untold.len(), 1, "{untold:?}");
    untold.remove(0)
}

async fn nothing_is_untold(store: &Tested) {
    assert_eq!(store.unannounced(Unannounced::All, 9).await.unwrap(), []);
}

fn wanting_all(sinks: &[String]) -> Vec<Subscriber> {
    let all = |sink: &String| Subscriber { sink: sink.clone(), events: TypeFilter::All };
    sinks.iter().map(all).collect()
}

/// A record in doubt, of which that was told to a sink.
async fn told(store: &Tested, sinks: &[String]) -> (Scope, Fence) {
    let scope = scope();
    let (fence, _) = held(store, &scope).await;
    assert_eq!(store.mark_unknown(&scope, fence).await.unwrap(), Changed::Yes);
    let doubt = unannounced(store).await;
    let told = store.announce(&doubt, doubt.event(&wanting_all(sinks)).as_ref()).await.unwrap();
    assert_eq!(told, Changed::Yes);
    (scope, fence)
}

async fn kinds_of(store: &Tested, fence: Fence) -> Vec<String> {
    let all = EventFilter { record: Some(fence.id), limit: 99, ..EventFilter::default() };
    let rows = store.list_events(&all).await.unwrap();
    let mut kinds: Vec<_> = rows.into_iter().map(|row| row.kind).collect();
    kinds.sort();
    kinds
}

async fn a_doubt_is_told_once_and_its_end_once(store: Tested) {
    let (sinks, scope) = (vec![sink()], scope());
    let (fence, owner) = held(&store, &scope).await;
    nothing_is_untold(&store).await;
    assert_eq!(store.mark_unknown(&scope, fence).await.unwrap(), Changed::Yes);
    let doubt = unannounced(&store).await;
    assert_eq!((doubt.record, doubt.attempt), (fence.id, fence.attempt));
    assert_eq!((doubt.scope.as_ref(), doubt.kind), (Some(&scope), NoticeKind::Unknown));
    let reserved = store.show_record(fence.id).await.unwrap().unwrap().created_at;
    assert!(reserved <= doubt.since && doubt.since <= doubt.at);
    assert_eq!(store.unannounced(Unannounced::Resolved, 9).await.unwrap(), []);
    let event = doubt.event(&wanting_all(&sinks));
    let tells = (0..8).map(|_| store.announce(&doubt, event.as_ref()));
    let yes = futures_util::future::join_all(tells).await.into_iter().map(Result::unwrap);
    assert_eq!(yes.filter(|told| *told == Changed::Yes).count(), 1, "one of many tells it");
    nothing_is_untold(&store).await;
    assert_eq!(kinds_of(&store, fence).await, ["record.unknown"]);
    let claimed = claim(&store, &sinks[0], Lane::Fresh, 9, MINUTE).await;
    assert_eq!(claimed.len(), 1, "it is owed to the sink");
    assert_eq!(claimed[0].payload, event.as_ref().unwrap().payload);

    // The next attempt neither begins another doubt nor ends this one.
    let next = Fence { attempt: fence.attempt.next(), ..fence };
    let taken = store.take_over(proposal(&scope, owner), Takeover::Unknown(fence)).await.unwrap();
    assert_eq!(taken, Changed::Yes);
    nothing_is_untold(&store).await;
    assert_eq!(store.mark_unknown(&scope, next).await.unwrap(), Changed::Yes);
    nothing_is_untold(&store).await;
    assert!(is_done(complete(&store, completion(&scope, next, Vec::new())).await));
    let ended = unannounced(&store).await;
    assert_eq!((ended.attempt, ended.scope.as_ref()), (fence.attempt, Some(&scope)));
    assert_eq!(ended.kind, NoticeKind::Resolved(Resolution::Completed));
    assert_eq!(store.unannounced(Unannounced::Resolved, 9).await.unwrap().len(), 1);
    let event = ended.event(&wanting_all(&sinks));
    for expected in [Changed::Yes, Changed::No] {
        assert_eq!(store.announce(&ended, event.as_ref()).await.unwrap(), expected);
    }
    nothing_is_untold(&store).await;
    assert_eq!(kinds_of(&store, fence).await, ["record.resolved", "record.unknown"]);
}

async fn a_doubts_end_says_who_ended_it(store: Tested) {
    // Nobody wants the events: they stand as discarded.
    let (scope, fence) = told(&store, &[]).await;
    assert_eq!(store.operator_release(fence, false, &somebody()).await.unwrap(), Ok(()));
    let ended = unannounced(&store).await;
    assert_eq!(ended.kind, NoticeKind::Resolved(Resolution::ReleasedByOperator));
    assert_eq!(ended.scope, Some(scope), "although the record is gone");
    assert_eq!(store.announce(&ended, ended.event(&[]).as_ref()).await.unwrap(), Changed::Yes);
    assert_eq!(kinds_of(&store, fence).await, ["record.resolved", "record.unknown"]);

    let (scope, fence) = told(&store, &[]).await;
    assert_eq!(store.release(&scope, fence).await.unwrap(), Changed::Yes);
    let ended = unannounced(&store).await;
    assert_eq!(ended.kind, NoticeKind::Resolved(Resolution::Released));
    assert_eq!(ended.scope, Some(scope));
    assert_eq!(store.announce(&ended, None).await.unwrap(), Changed::Yes);
    assert_eq!(kinds_of(&store, fence).await, ["record.unknown"], "told of without an event");

    let (scope, fence) = told(&store, &[]).await;
    let by_hand = completion(&scope, fence, Vec::new());
    assert_eq!(store.operator_complete(&by_hand, &somebody()).await.unwrap(), Ok(()));
    let ended = unannounced(&store).await;
    assert_eq!(ended.kind, NoticeKind::Resolved(Resolution::CompletedByOperator));
    assert_eq!(store.announce(&ended, ended.event(&[]).as_ref()).await.unwrap(), Changed::Yes);
    nothing_is_untold(&store).await;
}

async fn lists_filter_and_go_on_where_they_stopped(store: Tested) {
    let sink = sink();
    let tenant = scope().tenant;
    let mut fences = Vec::new();
    for n in 0..5 {
        let key = Key::parse(&format!("k{n}")).unwrap();
        let scope = Scope { tenant: tenant.clone(), key, ..scope() };
        let (fence, _) = held(&store, &scope).await;
        if n != 4 {
            let events = vec![event(fence, "made", &[&sink]), event(fence, "told", &[])];
            assert!(is_done(complete(&store, completion(&scope, fence, events)).await));
        }
        fences.push(fence);
    }
    let all =
        RecordFilter { tenant: Some(tenant.to_string()), limit: 9, ..RecordFilter::default() };
    let rows = store.list_records(&all).await.unwrap();
    assert_eq!(rows.len(), 5);
    assert!(rows.windows(2).all(|two| two[0].created_at >= two[1].created_at), "newest first");
    let no_body = |answer: &Answer| answer.body == KeptBody::NotRetained;
    assert!(rows.iter().all(|row| row.answer.as_ref().is_none_or(no_body)));
    let count = async |filter| store.list_records(&filter).await.unwrap().len();
    assert_eq!(count(RecordFilter { key: Some("k1".into()), ..all.clone() }).await, 1);
    assert_eq!(count(RecordFilter { operation: Some("x".into()), ..all.clone() }).await, 0);
    assert_eq!(count(RecordFilter { status: Some(Status::InProgress), ..all.clone() }).await, 1);
    assert_eq!(count(RecordFilter { status: Some(Status::Completed), ..all.clone() }).await, 4);
    assert_eq!(count(RecordFilter { since: Some(MINUTE), ..all.clone() }).await, 5);
    assert_eq!(count(RecordFilter { since: Some(Duration::MAX), ..all.clone() }).await, 5);
    let mut paged = Vec::new();
    let mut page = RecordFilter { limit: 2, ..all };
    loop {
        let rows = store.list_records(&page).await.unwrap();
        let Some(last) = rows.last() else { break };
        page.after = Some((last.created_at, last.id.into()));
        paged.extend(rows.iter().map(|row| row.id));
        assert!(paged.len() <= 8, "a page repeats rows");
    }
    assert_eq!(paged, rows.iter().map(|row| row.id).collect::<Vec<_>>());

    let all = EventFilter { tenant: Some(tenant.to_string()), limit: 99, ..EventFilter::default() };
    let rows = store.list_events(&all).await.unwrap();
    assert_eq!(rows.len(), 8);
    let count = async |filter| store.list_events(&filter).await.unwrap().len();
    assert_eq!(count(EventFilter { sink: Some(sink.clone()), ..all.clone() }).await, 4);
    assert_eq!(count(EventFilter { status: Some(EventStatus::Sent), ..all.clone() }).await, 0);
    let discarded = Some(EventStatus::Discarded);
    assert_eq!(count(EventFilter { status: discarded, ..all.clone() }).await, 4);
    assert_eq!(count(EventFilter { record: Some(fences[0].id), ..all.clone() }).await, 2);
    assert_eq!(count(EventFilter { id: Some(rows[0].id), ..all.clone() }).await, 1);
    assert_eq!(count(EventFilter { key: Some("k3".into()), ..all.clone() }).await, 2);
    assert_eq!(count(EventFilter { since: Some(MINUTE), ..all.clone() }).await, 8);
    let mut paged = Vec::new();
    let mut page = EventFilter { limit: 3, ..all };
    loop {
        let rows = store.list_events(&page).await.unwrap();
        let Some(last) = rows.last() else { break };
        page.after = Some((last.created_at, last.id, last.sink.clone()));
        paged.extend(rows.iter().map(|row| row.id));
        assert!(paged.len() <= 8, "a page repeats rows");
    }
    assert_eq!(paged, rows.iter().map(|row| row.id).collect::<Vec<_>>());
}

async fn a_database_is_known_by_its_id(store: Tested) {
    let id = store.database_id().await.unwrap();
    assert_ne!(id, Uuid::nil());
    announced(&store, &sink(), &["e"]).await;
    assert_eq!(store.database_id().await.unwrap(), id, "whatever is in it");
}
