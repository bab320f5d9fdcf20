//! The decision table: each end, with each answer of the store, and with each record that the scope may have.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};

use super::*;
use crate::record::{Answer, Attempt, KeptBody, Key, Operation, OwnerId, Spelling, Tenant};
use crate::store::layer::Layer;
use crate::store::{Error, OperatorsLayer, OutboxLayer, RecordsLayer, SinksLayer, Store};

/// What the store says to the change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Says {
    Done,
    NoRow,
    Locked,
    Refuses,
    IsAway,
}

/// What it finds under the scope.
#[derive(Clone, Copy, Debug)]
enum Finds {
    /// The attempt's own record, completed: with the attempt's status and body, or with others.
    Answer,
    OtherAnswer,
    /// Completed under a later attempt, with the same status and body.
    LaterAnswer,
    /// The attempt's own record.
    Unknown,
    /// Its record at a later attempt.
    Later,
    Nothing,
    OtherRecord,
    Unreadable,
}

const FINDS: [Finds; 8] = [
    Finds::Answer,
    Finds::OtherAnswer,
    Finds::LaterAnswer,
    Finds::Unknown,
    Finds::Later,
    Finds::Nothing,
    Finds::OtherRecord,
    Finds::Unreadable,
];

/// What became of an end, as far as callers can distinguish it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Is {
    Completed,
    Released,
    Unknown { marked: bool, noted: bool },
    Already { answer: bool },
    FencedOff { answer: bool, noted: bool },
    Locked,
    Unread,
    Refused,
    Away,
}

/// A store that says one thing and finds one thing.
struct Fake(Says, Finds);

impl Layer for Fake {
    fn beneath(&self) -> Result<&dyn Store, Error> {
        Err(Error::Unavailable("not asked here".into()))
    }
}

impl OutboxLayer for Fake {}
impl SinksLayer for Fake {}
impl OperatorsLayer for Fake {}

impl Fake {
    fn change(&self) -> Result<Changed, Error> {
        match self.0 {
            Says::Done => Ok(Changed::Yes),
            Says::NoRow => Ok(Changed::No),
            Says::Locked => Ok(Changed::Locked),
            Says::Refuses => Err(Error::Refused("a value".into())),
            Says::IsAway => Err(Error::InDoubt("no word".into())),
        }
    }
}

impl RecordsLayer for Fake {
    async fn complete(&self, _: Arc<Completion>, _: Instant) -> Result<Settled, Error> {
        Ok(match self.change()? {
            Changed::Yes => Settled::Done { expires_at: SystemTime::UNIX_EPOCH },
            Changed::No => Settled::Fenced,
            Changed::Locked => Settled::Locked,
        })
    }

    async fn release(&self, _: &Scope, _: Fence) -> Result<Changed, Error> {
        self.change()
    }

    async fn mark_unknown(&self, _: &Scope, _: Fence) -> Result<Changed, Error> {
        self.change()
    }

    async fn find(&self, _: &Scope) -> Result<Option<Record>, Error> {
        let completed = |body| {
            let (expires_at, time_left) = (SystemTime::UNIX_EPOCH, Duration::ZERO);
            State::Completed(Box::new(Completed { answer: answer(body), expires_at, time_left }))
        };
        let own = fence();
        let later = Fence { attempt: own.attempt.next(), ..own };
        let other = Fence { id: RecordId::fresh(), attempt: Attempt::FIRST };
        let running = State::InProgress { owner: OwnerId::fresh(), owner_lives: true };
        let (fence, state) = match self.1 {
            Finds::Answer => (own, completed("own")),
            Finds::OtherAnswer => (own, completed("other")),
            Finds::LaterAnswer => (later, completed("own")),
            Finds::Unknown => (own, State::Unknown),
            Finds::Later => (later, running),
            Finds::OtherRecord => (other, running),
            Finds::Nothing => return Ok(None),
            Finds::Unreadable => return Err(Error::Unreadable("no key".into())),
        };
        Ok(Some(Record { fence, fingerprint: FINGERPRINT, caller: None, state }))
    }
}

const FINGERPRINT: Fingerprint = Fingerprint { canonical: [1; 32], raw: [2; 32], recipe: [3; 8] };

fn fence() -> Fence {
    Fence { id: uuid::Uuid::from_u128(7).into(), attempt: Attempt::from_number(2) }
}

fn scope() -> Scope {
    Scope { tenant: Tenant::stored("t"), operation: Operation::stored("o"), key: Key::stored("k") }
}

fn answer(body: &'static str) -> Answer {
    let body = KeptBody::Whole(Bytes::from_static(body.as_bytes()));
    let (headers, spelling) = (HeaderMap::new(), Spelling::default());
    Answer { status: StatusCode::CREATED, headers, spelling, body }
}

fn executed(found: bool) -> Executed {
    let (retention, events) = (Duration::from_secs(60), Vec::new());
    let completion =
        Completion { scope: scope(), fence: fence(), answer: answer("own"), retention, events };
    let completion = Arc::new(completion);
    Executed { completion, fingerprint: FINGERPRINT, caller: None, row: None, found }
}

fn release(late: Option<LateEnd>, tried: bool) -> End {
    End::Release(NotExecuted { scope: scope(), fence: fence(), late, tried })
}

fn late_end() -> End {
    End::Late(Box::new((&*executed(false).completion).into()))
}

async fn is(end: &End, says: Says, finds: Finds) -> Is {
    match settle(&Fake(says, finds), end, Instant::now()).await {
        Ok(settlement) => of(&settlement),
        Err(Unsettled::Locked) => Is::Locked,
        Err(Unsettled::Unread(_)) => Is::Unread,
        Err(Unsettled::Untaken(Error::Refused(_))) => Is::Refused,
        Err(Unsettled::Untaken(_)) => Is::Away,
    }
}

fn of(settlement: &Settlement) -> Is {
    let noted = settlement.late().is_some();
    match settlement {
        Settlement::Completed { .. } => Is::Completed,
        Settlement::Released => Is::Released,
        Settlement::Unknown { marked, .. } => Is::Unknown { marked: *marked, noted },
        Settlement::Already(answer) => Is::Already { answer: answer.is_some() },
        Settlement::FencedOff { answer, .. } => Is::FencedOff { answer: answer.is_some(), noted },
    }
}

const ALREADY: Is = Is::Already { answer: true };
const STANDS_AND_NOTED: Is = Is::FencedOff { answer: true, noted: true };
const NOTED: Is = Is::FencedOff { answer: false, noted: true };
const NEVER_NOTED: [Is; 8] = [
    ALREADY,
    ALREADY,
    Is::FencedOff { answer: true, noted: false },
    NOT_NOTED,
    NOT_NOTED,
    NOT_NOTED,
    NOT_NOTED,
    Is::Unread,
];
const NOT_NOTED: Is = Is::FencedOff { answer: false, noted: false };
const UNKNOWN: Is = Is::Unknown { marked: false, noted: false };

/// An end; what it is where its row was there; and where no row fits, by what is found, as in [`FINDS`].
type Row = (&'static str, End, Is, [Is; 8]);

fn executed_ones() -> [Row; 3] {
    let late_where_it_differs =
        [ALREADY, STANDS_AND_NOTED, STANDS_AND_NOTED, NOTED, NOTED, NOTED, NOTED, Is::Unread];
    let kept_unknown = Is::Unknown { marked: true, noted: true };
    let (own, question) = (End::Complete(executed(false)), End::Complete(executed(true)));
    let unkept = End::Unkept(executed(false));
    [
        ("complete", own, Is::Completed, late_where_it_differs),
        ("complete, found by a question", question, Is::Completed, NEVER_NOTED),
        ("unkept", unkept, kept_unknown, late_where_it_differs),
    ]
}

fn others() -> [Row; 5] {
    let [answer, noted, unread] = [STANDS_AND_NOTED, NOTED, Is::Unread];
    let first = release(Some(LateEnd::NotSent), false);
    let again = first.clone().again();
    let by_first_try = [answer, answer, answer, noted, noted, noted, noted, unread];
    let gone = Is::Already { answer: false };
    let by_later_try = [answer, answer, answer, noted, noted, gone, gone, unread];
    let marked = Is::Unknown { marked: true, noted: false };
    let lost = End::Unknown { scope: scope(), fence: fence(), row: None };
    let [own, other, later, ..] = NEVER_NOTED;
    let by_doubt = [own, other, later, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, unread];
    [
        ("release, the first try", first, Is::Released, by_first_try),
        ("release, tried before", again, Is::Released, by_later_try),
        ("release of what was never sent", release(None, false), Is::Released, NEVER_NOTED),
        ("unknown", lost, marked, by_doubt),
        ("late", late_end(), NOTED, [NOTED; 8]),
    ]
}

#[tokio::test]
async fn each_end_is_decided_by_what_the_store_says_and_finds() {
    let table = executed_ones().into_iter().chain(others());
    for (name, end, done, by_found) in table {
        assert_eq!(is(&end, Says::Done, Finds::Nothing).await, done, "{name}: done");
        for (finds, expected) in FINDS.into_iter().zip(by_found) {
            assert_eq!(is(&end, Says::NoRow, finds).await, expected, "{name}: {finds:?}");
        }
        if matches!(end, End::Late(_)) {
            continue;
        }
        // The record is not read before a row was looked for in vain.
        for (says, expected) in
            [(Says::Locked, Is::Locked), (Says::Refuses, Is::Refused), (Says::IsAway, Is::Away)]
        {
            assert_eq!(is(&end, says, Finds::Answer).await, expected, "{name}: {says:?}");
        }
    }
}

#[tokio::test]
async fn what_the_application_answers_under_a_held_attempt_is_that_attempts_own() {
    for (finds, held) in [
        (Finds::Answer, ALREADY),
        (Finds::OtherAnswer, ALREADY),
        (Finds::LaterAnswer, STANDS_AND_NOTED),
        (Finds::Later, NOTED),
        (Finds::Nothing, NOTED),
    ] {
        let end = End::Complete(executed(false));
        let settled = settle(&Fake(Says::NoRow, finds), &end, Instant::now()).await;
        let settlement = settled.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(of(&settlement.of_own_attempt(fence())), held, "{finds:?}");
    }
}

#[tokio::test]
async fn looking_changes_nothing() {
    let unknown = End::Unknown { scope: scope(), fence: fence(), row: None };
    // A change of a row would be reported as done.
    let looked = look(&Fake(Says::Done, Finds::Later), &unknown).await;
    assert_eq!(of(&looked.unwrap_or_else(|error| panic!("{error}"))), UNKNOWN);
}

#[test]
fn what_is_refused_is_pending_no_more_and_an_answer_leaves_a_word() {
    assert!(matches!(End::Complete(executed(false)).refused(), Some(End::Unkept(_))));
    assert!(End::Unkept(executed(false)).refused().is_none());
    assert!(release(Some(LateEnd::NotSent), true).refused().is_none());
    assert!(late_end().refused().is_none());
    for (unsettled, may_pass) in [
        (Unsettled::Locked, true),
        (Unsettled::Unread(Error::Unavailable("away".into())), true),
        (Unsettled::Untaken(Error::InDoubt("no word".into())), true),
        (Unsettled::Untaken(Error::Refused("a value".into())), false),
        (Unsettled::Unread(Error::Unreadable("no key".into())), false),
    ] {
        assert_eq!(unsettled.may_pass(), may_pass, "{unsettled:?}");
    }
}
