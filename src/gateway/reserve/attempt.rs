//! The life of an attempt, as the only values by which it can be acted on: a [`Reservation`] is used up by sending, what is
//! [`Underway`] must be settled, and one that has [`Parted`] has an answer that may still come.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::inquiry::Held;
use super::settler::{Debt, Settler};
use super::{Ask, Ending, Lead, Sending};
use crate::gateway::room::AnswerRoom;
use crate::gateway::settle::{End, NotExecuted};
use crate::record::{Caller, Fence, Fingerprint, LeaseView, OwnerId, Scope};
use crate::store::Proposal;

/// A committed reservation: the right to send one request. Made by the desk only, used up by sending.
pub(in crate::gateway) struct Reservation(Box<Underway>);

/// An attempt whose record says `unknown`, or will: its entry is gone, and its answer may still come.
pub(in crate::gateway) struct Parted(Box<Underway>);

impl Reservation {
    /// Of a record that is held for this request, under the lead of its scope.
    pub(super) fn new(
        held: &Held,
        ask: &Ask,
        lead: Lead,
        lease: LeaseView,
        settler: Arc<Settler>,
    ) -> Self {
        lead.running(held.fence.id, held.fingerprint, ask.caller.clone());
        let open = Arc::new(Proposal {
            id: held.fence.id,
            scope: ask.scope.clone(),
            fingerprint: held.fingerprint,
            owner: held.owner,
            caller: ask.caller.as_ref().map(ToString::to_string),
            context: ask.context.clone(),
            retention: ask.retention,
        });
        lead.executes(held.fence, Some(&open));
        Self(Box::new(Underway {
            open: Some(open),
            scope: ask.scope.clone(),
            fence: held.fence,
            fingerprint: held.fingerprint,
            caller: ask.caller.clone(),
            owner: held.owner,
            lease,
            sending: lead.sending(),
            known: None,
            raising: None,
            timing: Timing::InTime,
            lead: Some(lead),
            settler,
        }))
    }

    /// What holds the record for a question: as good as sent, since an earlier process may have done so under this attempt.
    pub(super) fn in_doubt(self) -> Box<Underway> {
        let mut underway = self.0;
        underway.sending.may_begin();
        underway.opens(None);
        underway
    }

    pub(in crate::gateway) fn fence(&self) -> Fence {
        self.0.fence
    }

    /// Uses the reservation up: the holder of what comes back sends the request, once.
    pub(in crate::gateway) fn begin(self) -> Box<Underway> {
        self.0
    }
}

impl Parted {
    pub(in crate::gateway) fn fence(&self) -> Fence {
        self.0.fence
    }

    /// The attempt whose late answer has come.
    pub(super) fn answered(self) -> Box<Underway> {
        self.0
    }
}

/// When an attempt is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Timing {
    /// While its record is in progress for it.
    InTime,
    /// After its record was given up.
    Late,
}

/// An attempt whose request has been handed to the network. It must be settled; see [`Settler`].
pub(in crate::gateway) struct Underway {
    pub(in crate::gateway) scope: Scope,
    pub(in crate::gateway) fence: Fence,
    pub(in crate::gateway) fingerprint: Fingerprint,
    pub(in crate::gateway) caller: Option<Caller>,
    pub(super) owner: OwnerId,
    lease: LeaseView,
    sending: Sending,
    /// The end that is known, and that the store is being asked to take: owed, should this be dropped meanwhile.
    known: Option<(End, Ending)>,
    /// The next attempt is being written in its place; for how long a lost session may still commit that.
    raising: Option<Duration>,
    timing: Timing,
    /// What its row says, for the case that the database forgets it. None: it is asked about, and others made its row.
    open: Option<Arc<Proposal>>,
    /// None: it has parted, and somebody else works on its scope.
    lead: Option<Lead>,
    settler: Arc<Settler>,
}

impl Underway {
    /// The check before the first byte: this process's lease is certain. From a "yes" on, the attempt counts as sent.
    pub(in crate::gateway) fn may_write(&self) -> impl Fn() -> bool + Send + Sync + 'static {
        let (lease, owner, sending) = (self.lease.clone(), self.owner, self.sending.clone());
        move || {
            let held = lease.holds(owner, Instant::now());
            if held {
                sending.may_begin();
            }
            held
        }
    }

    /// Keeps the answer's room until the store has taken the end.
    pub(in crate::gateway) fn hold(&mut self, room: Option<AnswerRoom>) {
        if let Some(lead) = &mut self.lead {
            lead.room = room;
        }
    }

    /// Whether nobody but the application itself can have completed this very attempt: its record was in the hands of this
    /// process all the while. Else somebody may have asked the upstream about it.
    pub(in crate::gateway) fn was_held(&self) -> bool {
        self.timing == Timing::InTime && self.lease.holds(self.owner, Instant::now())
    }

    /// What its row says, while it is in progress for this attempt as far as this process knows.
    pub(in crate::gateway) fn open(&self) -> Option<&Arc<Proposal>> {
        self.open.as_ref().filter(|_| self.timing == Timing::InTime)
    }

    /// It is about to be freed: from here on its row may be gone, and is not brought back.
    pub(in crate::gateway) fn frees(&mut self) {
        if self.timing == Timing::Late {
            // That nobody knew how it ended is remembered.
            self.settler.forget(self.fence.id);
        }
        self.opens(None);
    }

    fn opens(&mut self, open: Option<Arc<Proposal>>) {
        if let Some(lead) = &self.lead {
            lead.executes(self.fence, open.as_ref());
        }
        self.open = open;
    }

    /// It leads its scope again.
    pub(super) fn leads(&mut self, lead: Lead) {
        self.lead = Some(lead);
    }

    /// Whether a late answer of this attempt, or of one before it, has come to this process meanwhile.
    pub(super) fn is_answered(&self) -> bool {
        self.lead.as_ref().is_none_or(|lead| lead.entry.answered.load(Ordering::SeqCst))
    }

    /// The next attempt is about to be written in this one's place: dropped from here on, that is taken back.
    /// `window`: for how long a lost session may still commit it.
    pub(super) fn raise(&mut self, window: Duration) {
        self.raising = Some(window);
    }

    /// The next attempt was not written.
    pub(super) fn not_raised(&mut self) {
        self.raising = None;
    }

    /// The record is at the next attempt, of which nothing has been sent, and says this now.
    pub(super) fn raised(mut self: Box<Self>, open: Arc<Proposal>) -> Reservation {
        self.fence.attempt = self.fence.attempt.next();
        self.raising = None;
        self.opens(Some(open));
        self.sending = Sending::default();
        Reservation(self)
    }

    /// Whether the first byte may have been written.
    pub(in crate::gateway) fn sent(&self) -> bool {
        self.sending.has_begun()
    }

    /// The end is known, with what those who wait get where it is released. Until it is settled or owed, dropping this owes it.
    pub(in crate::gateway) fn knows(&mut self, end: End, ending: Ending) {
        self.known = Some((end.again(), ending));
    }

    /// The store has taken the end: the entry goes, its followers learn the ending.
    pub(in crate::gateway) fn settled(mut self: Box<Self>, ending: Ending) {
        if let Some(lead) = self.lead.take() {
            lead.end(ending);
        }
    }

    /// The store did not take the end yet: the settler goes on trying, and keeps the entry until it has.
    pub(in crate::gateway) fn owe(mut self: Box<Self>, debt: Debt) {
        let lead = self.lead.take();
        self.settler.owe(debt, lead);
    }

    /// As [`Underway::settled`]; the attempt lives on without an entry.
    pub(in crate::gateway) fn part(mut self: Box<Self>, ending: Ending) -> Parted {
        if let Some(lead) = self.lead.take() {
            lead.end(ending);
        }
        self.timing = Timing::Late;
        Parted(self)
    }

    /// As [`Underway::owe`]; the attempt lives on without an entry.
    pub(in crate::gateway) fn part_owing(mut self: Box<Self>, debt: Debt) -> Parted {
        let lead = self.lead.take();
        self.settler.owe(debt, lead);
        self.timing = Timing::Late;
        Parted(self)
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        if !self.sent() {
            self.frees();
        }
        if let Some(lead) = self.lead.take() {
            let (scope, fence) = (self.scope.clone(), self.fence);
            let debt = if let Some((end, ending)) = self.known.take() {
                let keeping =
                    matches!(end, End::Complete(_)).then(|| self.settler.spill().in_memory());
                Debt::End { end: Box::new(end), ending, keeping }
            } else if let Some(window) = self.raising {
                Debt::Unraise { scope, fence, owner: self.owner, window }
            } else if self.sent() {
                Debt::of(End::Unknown { scope, fence, open: self.open().cloned() })
            } else {
                Debt::of(End::Release(NotExecuted { scope, fence, late: None, tried: false }))
            };
            self.settler.owe(debt, Some(lead));
        }
    }
}
