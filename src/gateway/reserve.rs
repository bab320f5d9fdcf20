//! Duplicates meet here: who executes, who waits, who gets a stored answer.
//!
//! The [`Desk`] keeps one [`Entry`] for each scope that this process works on. The first request of a scope takes
//! the entry's [`Lead`] and asks the store; the others follow, woken in the process, holding no connection and never
//! polling the database. One that comes while an execution has been under way for a while asks once, for all of them,
//! whether the application has completed the record by itself. What must stay true:
//!
//! - A [`Reservation`] is made here only, after its row is committed, and is used up by sending it. Dropped before a
//!   byte went out it is released; dropped later it becomes `unknown`. Either is owed to the store by the [`Settler`],
//!   and the entry stays until the store has taken it: duplicates on this replica see the entry before the database.
//! - Another request under the scope is refused as soon as the record's fingerprint is known, and not before.
//! - Where only the same caller may read ([`Readers::Caller`]), that is decided before fingerprints are compared: another
//!   caller learns that the key is taken, not whether it has guessed the request, and gets nothing that the first one got.
//! - Followers of an attempt that ends `unknown` are told so; only a duplicate that arrives later starts an attempt.
//! - Losing a task (panic, shutdown) wakes its followers: a [`Lead`] that is dropped tells them to look again.

mod attempt;
mod cache;
mod ends;
mod inquiry;
mod question;
mod settler;

use std::collections::HashMap;
use std::collections::hash_map;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::watch;

pub(super) use self::attempt::{Parted, Reservation, Underway};
use self::cache::Cache;
pub(super) use self::cache::Replay;
pub(super) use self::ends::{Completed as CompletedEnd, End, Ends, Numbered};
use self::inquiry::{Held, Inquiry, Step};
pub(super) use self::question::{Question, Raised};
pub(super) use self::settler::{Debt, Settler, Told};
use super::room::AnswerRoom;
use super::settle::Stored;
use super::spill::Spill;
use crate::record::{
    Caller, Completed, Fence, Fingerprint, LeaseView, OwnerId, Record, RecordId, Scope, State,
};
use crate::route::OnUnknown;
use crate::store::{Backlog, Proposal, Store};
use crate::telemetry::Metrics;
use crate::telemetry::pace::Pace;

/// First pause between two looks at a record that another replica works on; it doubles up to [`POLL_MAX`].
const POLL_FIRST: Duration = Duration::from_millis(20);
const POLL_MAX: Duration = Duration::from_millis(500);

/// How often the store is asked, at most, about a record that is being worked on here: the application may have completed
/// it by itself while it still works. Only a duplicate that comes, or is about to be told no, asks.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Most rounds of "the row moved on, look again" before the store counts as unavailable: each round means that
/// somebody else made progress on this very scope.
const ROUNDS_MAX: u32 = 64;

/// How the desk is set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How long a reservation may take before the caller is told that the store is unavailable.
    pub reserve_timeout: Duration,
    /// How long the old backend of a statement in doubt may still commit.
    pub doubt_window: Duration,
    /// Bytes of answers kept in memory for replay.
    pub cache_bytes: u64,
}

/// Whether this replica may judge other owners by their leases; see `lease`.
pub type MayJudge = Arc<dyn Fn() -> bool + Send + Sync>;

/// A keyed request that wants to be executed once.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) scope: Scope,
    pub(super) fingerprint: Fingerprint,
    pub(super) caller: Option<Caller>,
    pub(super) readers: Readers,
    pub(super) context: Option<Bytes>,
    pub(super) on_unknown: OnUnknown,
    pub(super) retention: Duration,
    pub(super) owes: Owes,
}

/// What a stored outcome of a request owes to sinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owes {
    /// No sink gets an event of it.
    Nothing,
    /// It may.
    Events,
}

/// Who gets what another request under the scope came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readers {
    /// Everybody within the scope.
    Scope,
    /// Whoever is let before an answer is given (see `rights`). What is not kept goes to the same caller only.
    Subrequest,
    /// The same caller only.
    Caller,
}

impl Readers {
    /// Whether two callers, or their digests, are strangers to each other, where that counts.
    pub(super) fn part<C: PartialEq>(self, one: Option<&C>, other: Option<&C>) -> bool {
        match self {
            Self::Scope | Self::Subrequest => false,
            Self::Caller => one != other,
        }
    }
}

impl Ask {
    /// Whether this is another caller than the one who made the record, where that counts.
    fn is_stranger(&self, caller: Option<&Caller>) -> bool {
        self.readers.part(self.caller.as_ref(), caller)
    }

    /// Whether an answer that is not kept, and that this caller got, is this one's too.
    fn shares(&self, caller: Option<&Caller>) -> bool {
        match self.readers {
            Readers::Scope => true,
            Readers::Subrequest | Readers::Caller => self.caller.as_ref() == caller,
        }
    }
}

/// What a keyed request gets.
pub(super) enum Admission {
    /// It is executed, by the holder of this value.
    Execute(Reservation),
    /// The upstream is asked first what became of the attempt before.
    Ask(Question),
    /// The stored answer.
    Replay(Arc<Replay>),
    /// The answer of an attempt that ran meanwhile on this replica and was not kept.
    Share(Arc<Shared>),
    /// Neither.
    Refuse(Refusal),
}

/// The answer of an attempt that is not kept, for those that waited for it.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) record: RecordId,
    /// Whose attempt it was.
    pub(super) caller: Option<Caller>,
    pub(super) answer: SharedAnswer,
}

/// What the attempt came to.
#[derive(Debug)]
pub(super) enum SharedAnswer {
    /// The upstream's answer, known not to have executed.
    Released(crate::record::Answer),
    /// Not one byte reached the upstream.
    Unreachable,
}

/// Why a keyed request is neither executed nor answered from a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Another request stands under the scope.
    Mismatch { record: RecordId },
    /// Another caller's request stands under the scope.
    Forbidden { record: RecordId },
    /// It is still running after the wait.
    InProgress { record: Option<RecordId> },
    /// Nobody knows whether it executed. `again`: when more may be known.
    OutcomeUnknown { record: RecordId, again: Option<Duration> },
    /// No reservation could be made; nothing was forwarded.
    StoreUnavailable(Unreserved),
    /// Too many events are owed already; nothing was reserved.
    Swamped,
    /// The database refuses to hold what has to be kept of the request; nothing was reserved.
    NotStorable,
}

/// Whether a request for which no reservation could be made has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unreserved {
    /// The store was away: this request has none, and no record was seen under its scope.
    Certainly,
    /// There may be one, or another attempt's record stands there.
    Perhaps,
}

/// Where the requests of one process meet, by scope.
pub struct Desk {
    settings: Settings,
    store: Arc<dyn Store>,
    lease: LeaseView,
    may_judge: MayJudge,
    entries: Arc<Entries>,
    open: Open,
    cache: Cache,
    ends: Ends,
    settler: Arc<Settler>,
    backlog: Backlog,
    metrics: Arc<Metrics>,
    /// Of lines about requests that could not be reserved.
    unreserved: Pace,
}

type Entries = Mutex<HashMap<Scope, Arc<Entry>>>;

/// What this process knows of a scope it works on.
struct Entry {
    news: watch::Sender<News>,
    /// When the store was asked last; at first, when the entry was made.
    asked: Mutex<Instant>,
    /// The attempt that is executed, and all that its row says.
    open: Mutex<Option<(Fence, Arc<Proposal>)>>,
    /// A late answer of an earlier attempt has come meanwhile, and may still be owed to the store.
    answered: AtomicBool,
}

impl Entry {
    fn open(&self) -> MutexGuard<'_, Option<(Fence, Arc<Proposal>)>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is time to ask the store; then it counts as asked.
    fn look_is_due(&self) -> bool {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let due = asked.elapsed() >= LOOK_EVERY;
        if due {
            *asked = Instant::now();
        }
        due
    }
}

/// How far an entry is.
#[derive(Clone)]
enum News {
    /// Its leader asks the store.
    Proposed,
    /// A record stands under the scope and is being worked on, here or by another replica.
    Running { record: RecordId, fingerprint: Fingerprint, caller: Option<Caller> },
    /// It ended.
    Ended(Ending),
}

/// How an entry ended, for its followers.
#[derive(Clone, Debug)]
pub(super) enum Ending {
    /// With a stored answer.
    Kept(Arc<Replay>),
    /// With an answer that is not kept.
    Shared(Arc<Shared>),
    /// Nobody knows how.
    Unknown(RecordId),
    /// No reservation could be made.
    Unavailable(Unreserved),
    /// None was made, since too many events are owed.
    Swamped,
    /// Its leader left without an end: look again.
    LookAgain,
}

/// Scopes whose record was last seen running somewhere, or with an outcome that nobody knows: what is known of them while
/// the store is away. The last [`OPEN_MAX`] that were looked at.
#[derive(Clone)]
struct Open(Arc<quick_cache::sync::Cache<Scope, ()>>);

/// So many are remembered.
const OPEN_MAX: usize = 16_384;

impl Default for Open {
    fn default() -> Self {
        Self(Arc::new(quick_cache::sync::Cache::new(OPEN_MAX)))
    }
}

impl Open {
    fn note(&self, scope: &Scope) {
        self.0.insert(scope.clone(), ());
    }

    fn forget(&self, scope: &Scope) {
        self.0.remove(scope);
    }

    fn has(&self, scope: &Scope) -> bool {
        self.0.get(scope).is_some()
    }
}

/// The sole right to act on a scope in this process. Dropping it ends the entry.
pub(super) struct Lead {
    scope: Scope,
    entry: Arc<Entry>,
    entries: Arc<Entries>,
    open: Open,
    ending: Ending,
    /// Of the answer, which stays in memory as long as it is owed to the store.
    room: Option<AnswerRoom>,
    /// Whether a byte of the request may have been sent.
    sending: Sending,
    /// How what the store is being asked for is undone: owed, should this be dropped meanwhile.
    undo: Option<Undo>,
    settler: Arc<Settler>,
}

/// How what the store may have done is undone; within this time a lost session may still commit it.
#[derive(Clone, Copy, Debug)]
enum Undo {
    /// A reservation, or a takeover of an expired record or for a retry.
    Withdraw { fence: Fence, window: Duration },
    /// A takeover for a question.
    Unask { fence: Fence, window: Duration },
}

impl Undo {
    fn of(self, scope: Scope) -> Debt {
        match self {
            Self::Withdraw { fence, window } => Debt::Withdraw { scope, fence, window },
            Self::Unask { fence, window } => Debt::Unask { scope, fence, window },
        }
    }
}

/// Whether a byte of a request may have been sent: noted before it is. Whoever waits for a lost task reads it.
#[derive(Clone, Debug, Default)]
pub(super) struct Sending(Arc<AtomicBool>);

impl Sending {
    fn may_begin(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(super) fn has_begun(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

impl Lead {
    /// Whether a byte of this leader's request may have been sent.
    pub(super) fn sending(&self) -> Sending {
        self.sending.clone()
    }

    /// Ends the entry with this for its followers.
    pub(super) fn end(mut self, ending: Ending) {
        self.ending = ending;
    }

    /// It executes this attempt, whose row says this; none: it does not.
    fn executes(&self, fence: Fence, open: Option<&Arc<Proposal>>) {
        *self.entry.open() = open.map(|open| (fence, Arc::clone(open)));
    }

    /// The same lead, for whoever goes on with it.
    fn successor(&self) -> Self {
        Self {
            scope: self.scope.clone(),
            entry: Arc::clone(&self.entry),
            entries: Arc::clone(&self.entries),
            open: self.open.clone(),
            ending: Ending::LookAgain,
            room: None,
            sending: self.sending.clone(),
            undo: None,
            settler: self.settler.clone(),
        }
    }

    fn running(&self, record: RecordId, fingerprint: Fingerprint, caller: Option<Caller>) {
        self.entry.news.send_replace(News::Running { record, fingerprint, caller });
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        // Lost while the store was asked. The entry stays until what it may have done is undone: a duplicate that found the
        // record without it would take it for one that may have been sent.
        if let Some(undo) = self.undo.take() {
            let lead = self.successor();
            self.settler.owe(undo.of(self.scope.clone()), Some(lead));
            return;
        }
        match &self.ending {
            Ending::Unknown(_) => self.open.note(&self.scope),
            Ending::Kept(_) => self.open.forget(&self.scope),
            // A later attempt that did not execute leaves the doubt about those before it.
            Ending::Shared(_) | Ending::Unavailable(_) | Ending::Swamped | Ending::LookAgain => {}
        }
        // First out of the map, then the news: a follower that looks again finds no ended entry.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.scope);
        self.entry.news.send_replace(News::Ended(self.ending.clone()));
    }
}

/// A follower's place at an entry.
pub(super) struct Follow {
    news: watch::Receiver<News>,
    entry: Arc<Entry>,
}

/// What a request finds at the desk.
pub(super) enum Seat {
    /// There is a stored answer in memory: it, or a mismatch with it.
    Decided(Admission),
    /// Nobody works on the scope in this process: it is the leader now.
    Lead(Lead),
    /// Somebody does.
    Follow(Follow),
}

/// What waiting brought.
pub(super) enum Followed {
    /// This answer.
    Admitted(Admission),
    /// The leader left: take a seat again.
    LookAgain,
}

impl Desk {
    /// A desk before this store.
    pub fn new(
        settings: Settings,
        store: Arc<dyn Store>,
        lease: LeaseView,
        may_judge: MayJudge,
        spill: Spill,
        backlog: Backlog,
        metrics: Arc<Metrics>,
    ) -> Self {
        let cache = Cache::new(settings.cache_bytes);
        // A share of its own beside the answers that are kept for replay.
        let ends = Ends::new(settings.cache_bytes / 2);
        let kept = (cache.clone(), ends.clone());
        let (asked, counted) = (Arc::clone(&store), Arc::clone(&metrics));
        let settler = Arc::new(Settler::new(asked, lease.clone(), kept, spill, counted));
        let (entries, open) = (Arc::default(), Open::default());
        Self {
            settings,
            store,
            lease,
            may_judge,
            entries,
            open,
            cache,
            ends,
            settler,
            backlog,
            metrics,
            unreserved: Pace::default(),
        }
    }

    /// The settler, for shutdown.
    pub(super) fn settler(&self) -> &Settler {
        &self.settler
    }

    /// Whether a request may not be begun, because the events that it would owe are too many.
    fn is_swamped(&self, ask: &Ask) -> bool {
        ask.owes == Owes::Events && self.backlog.is_full()
    }

    /// Whether the record under this scope was last seen running, or its outcome unknown.
    pub(super) fn saw_open(&self, scope: &Scope) -> bool {
        self.open.has(scope)
    }

    /// Keeps a stored answer in memory for replay.
    pub(super) fn remember(&self, scope: &Scope, replay: &Arc<Replay>) {
        self.settler.remember(scope, replay);
    }

    /// What was confirmed of ended attempts.
    pub(super) fn ends(&self) -> &Ends {
        &self.ends
    }

    /// Who holds the records of this process now.
    pub(super) fn owner(&self) -> OwnerId {
        self.lease.current().owner
    }

    /// Whether somebody in this process works on the scope, or owes its record's end.
    pub(super) fn works_on(&self, scope: &Scope) -> bool {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).contains_key(scope)
    }

    /// The attempts that are executed in this process, or whose ends are owed.
    pub(super) fn running(&self) -> Vec<(Fence, Arc<Proposal>)> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.values().filter_map(|entry| entry.open().clone()).collect()
    }

    /// Whether this attempt is executed in this process, or its end is owed, and it is not about to be freed.
    pub(super) fn executes(&self, scope: &Scope, fence: Fence) -> bool {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let open = entries.get(scope).and_then(|entry| entry.open().clone());
        open.is_some_and(|(at, _)| at == fence)
    }

    /// Forgets the answers of records that an operator acted on.
    pub(super) fn forget(&self, records: &[RecordId]) {
        self.cache.forget(records);
    }

    /// A late answer has come. Where nobody here works on the scope by now, the attempt leads again: duplicates on this
    /// replica wait for what the answer comes to. Whoever works on it is told, lest it sends the next attempt while the answer
    /// is on its way to the store.
    pub(super) fn resume(&self, parted: Parted) -> Box<Underway> {
        let mut underway = parted.answered();
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        match entries.entry(underway.scope.clone()) {
            hash_map::Entry::Vacant(place) => {
                let (record, fingerprint) = (underway.fence.id, underway.fingerprint);
                let caller = underway.caller.clone();
                let news = News::Running { record, fingerprint, caller };
                underway.leads(self.take_the_lead(place, news));
            }
            hash_map::Entry::Occupied(entry) => entry.get().answered.store(true, Ordering::SeqCst),
        }
        drop(entries);
        underway
    }

    fn take_the_lead(
        &self,
        place: hash_map::VacantEntry<'_, Scope, Arc<Entry>>,
        news: News,
    ) -> Lead {
        let scope = place.key().clone();
        let (news, asked) = (watch::Sender::new(news), Instant::now().into());
        let (open, answered) = (Mutex::default(), AtomicBool::new(false));
        let entry = Arc::new(Entry { news, asked, open, answered });
        place.insert(Arc::clone(&entry));
        Lead {
            scope,
            entry,
            entries: Arc::clone(&self.entries),
            open: self.open.clone(),
            ending: Ending::LookAgain,
            room: None,
            sending: Sending::default(),
            undo: None,
            settler: self.settler.clone(),
        }
    }

    /// A place for a request: a stored answer in memory, the lead, or behind whoever leads.
    pub(super) fn seat(&self, ask: &Ask) -> Seat {
        let scope = &ask.scope;
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        match entries.entry(scope.clone()) {
            hash_map::Entry::Occupied(entry) => {
                // Completed by the application, while its answer is still awaited here.
                if let Some(replay) = self.cache.get(scope, Instant::now()) {
                    return Seat::Decided(from_record(ask, replay));
                }
                let entry = Arc::clone(entry.get());
                Seat::Follow(Follow { news: entry.news.subscribe(), entry })
            }
            hash_map::Entry::Vacant(place) => {
                // Looked up under the lock: an entry that ends is in the cache before it leaves the map.
                if let Some(replay) = self.cache.get(scope, Instant::now()) {
                    return Seat::Decided(from_record(ask, replay));
                }
                Seat::Lead(self.take_the_lead(place, News::Proposed))
            }
        }
    }

    /// Waits behind a leader until `deadline`.
    pub(super) async fn follow(&self, ask: &Ask, follow: Follow, deadline: Instant) -> Followed {
        let Follow { mut news, entry } = follow;
        let _waiting = self.metrics.waiting();
        let mut running = None;
        let mut stranger = false;
        let mut looks = entry.look_is_due();
        loop {
            let now = news.borrow_and_update().clone();
            match now {
                News::Proposed => {}
                News::Running { record, fingerprint, caller } => {
                    stranger = ask.is_stranger(caller.as_ref());
                    if !stranger && !fingerprint.same_request(&ask.fingerprint) {
                        return Followed::Admitted(Admission::Refuse(Refusal::Mismatch { record }));
                    }
                    running = Some(record);
                }
                News::Ended(Ending::Unknown(record)) if stranger => {
                    return Followed::Admitted(Admission::Refuse(Refusal::Forbidden { record }));
                }
                News::Ended(ending) => return ended(ask, ending),
            }
            let changed = tokio::time::timeout_at(deadline.into(), news.changed());
            let changed = tokio::select! {
                changed = changed => changed,
                found = self.look(ask), if looks && running.is_some() => {
                    looks = false;
                    match found {
                        Some(admission) => return Followed::Admitted(admission),
                        None => continue,
                    }
                }
            };
            match changed {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Followed::LookAgain,
                Err(_) => return Followed::Admitted(self.in_progress(ask, running, &entry).await),
            }
        }
    }

    /// The wait is over, and the execution is not. Before the caller is told so, the store may know better.
    async fn in_progress(&self, ask: &Ask, record: Option<RecordId>, entry: &Entry) -> Admission {
        let cached = self.cache.get(&ask.scope, Instant::now());
        if let Some(replay) = cached {
            return from_record(ask, replay);
        }
        if entry.look_is_due()
            && let Ok(Some(admission)) = tokio::time::timeout(LOOK_EVERY, self.look(ask)).await
        {
            return admission;
        }
        Admission::Refuse(Refusal::InProgress { record })
    }

    /// The answer of a record that somebody else completed while it is being worked on here.
    async fn look(&self, ask: &Ask) -> Option<Admission> {
        let Ok(Some(record)) = self.store.find(&ask.scope).await else { return None };
        let Record { fence, fingerprint, caller, state: State::Completed(completed) } = record
        else {
            return None;
        };
        if completed.time_left.is_zero() {
            return None;
        }
        let completed = *completed;
        let replay = Arc::new(replay_of(Stored { fence, fingerprint, caller, completed }));
        self.remember(&ask.scope, &replay);
        Some(from_record(ask, replay))
    }

    /// Asks the store as the scope's leader, until there is a decision; waits for another replica until `deadline`.
    pub(super) async fn lead(&self, ask: &Ask, mut lead: Lead, deadline: Instant) -> Admission {
        let mut inquiry = Inquiry::new(self, ask, &mut lead);
        let mut pause = POLL_FIRST;
        let mut next = inquiry.propose().await;
        for _ in 0..ROUNDS_MAX {
            while let Step::Wait(record) = next {
                if Instant::now() >= deadline {
                    return Admission::Refuse(Refusal::InProgress { record: Some(record) });
                }
                let jittered = pause.mul_f64(0.5 + fastrand::f64() / 2.0);
                tokio::time::sleep_until((Instant::now() + jittered).min(deadline).into()).await;
                pause = (pause * 2).min(POLL_MAX);
                next = inquiry.look().await;
            }
            match next {
                Step::Held(held) => return Admission::Execute(self.reservation(&held, ask, lead)),
                Step::Asks { held, lookup, context } => {
                    return Admission::Ask(self.asks(held, ask, lead, &lookup, context));
                }
                Step::Doubt(debt) => {
                    self.settler.owe(*debt, Some(lead));
                    return Admission::Refuse(Refusal::StoreUnavailable(Unreserved::Perhaps));
                }
                Step::Replay(replay) => {
                    self.remember(&ask.scope, &replay);
                    lead.end(Ending::Kept(Arc::clone(&replay)));
                    return Admission::Replay(replay);
                }
                Step::Unknown(record, again) => {
                    lead.end(Ending::Unknown(record));
                    return Admission::Refuse(Refusal::OutcomeUnknown { record, again });
                }
                Step::Refuse(refusal) => {
                    match refusal {
                        Refusal::StoreUnavailable(unreserved) => {
                            lead.end(Ending::Unavailable(unreserved));
                        }
                        Refusal::Swamped => lead.end(Ending::Swamped),
                        Refusal::Mismatch { .. }
                        | Refusal::Forbidden { .. }
                        | Refusal::InProgress { .. }
                        | Refusal::OutcomeUnknown { .. }
                        // Others look for themselves: what they want to be kept may be something else.
                        | Refusal::NotStorable => {}
                    }
                    return Admission::Refuse(refusal);
                }
                Step::Again | Step::Wait(_) => next = inquiry.propose().await,
            }
        }
        tracing::warn!("a record kept moving while it was being reserved");
        Admission::Refuse(Refusal::StoreUnavailable(Unreserved::Perhaps))
    }

    fn reservation(&self, held: &Held, ask: &Ask, lead: Lead) -> Reservation {
        Reservation::new(held, ask, lead, self.lease.clone(), self.settler.clone())
    }
}

/// A stored answer for the same request; for another one, a mismatch; for another caller neither.
fn from_record(ask: &Ask, replay: Arc<Replay>) -> Admission {
    if ask.is_stranger(replay.caller.as_ref()) {
        Admission::Refuse(Refusal::Forbidden { record: replay.fence.id })
    } else if replay.fingerprint.same_request(&ask.fingerprint) {
        Admission::Replay(replay)
    } else {
        Admission::Refuse(Refusal::Mismatch { record: replay.fence.id })
    }
}

fn ended(ask: &Ask, ending: Ending) -> Followed {
    Followed::Admitted(match ending {
        Ending::Kept(replay) => from_record(ask, replay),
        Ending::Shared(shared) if ask.shares(shared.caller.as_ref()) => Admission::Share(shared),
        // The key is free again: who gets no share asks for itself.
        Ending::Shared(_) => return Followed::LookAgain,
        Ending::Unknown(record) => {
            Admission::Refuse(Refusal::OutcomeUnknown { record, again: None })
        }
        Ending::Unavailable(unreserved) => Admission::Refuse(Refusal::StoreUnavailable(unreserved)),
        Ending::Swamped => Admission::Refuse(Refusal::Swamped),
        Ending::LookAgain => return Followed::LookAgain,
    })
}

/// A completed record as it is replayed, with the end of its life in memory.
fn replay_of(Stored { fence, fingerprint, caller, completed }: Stored) -> Replay {
    let Completed { answer, expires_at, time_left } = completed;
    Replay::new(fence, fingerprint, caller, answer, expires_at, Instant::now() + time_left)
}
