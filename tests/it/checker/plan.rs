//! What a run does, from its seed alone: what clients ask, how the API answers each execution, what the nemesis breaks
//! and when. Only the timing of the processes is chance.

use super::history::Scope;

/// The routes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Holds what is unknown; three templates.
    Orders,
    /// Executes again what is unknown: its API may be asked to repeat.
    Payments,
    /// Answers that may be larger than what is kept.
    Reports,
    /// Waits only briefly for an execution that runs.
    Slots,
    /// Asks the API about what is unknown.
    Refunds,
    /// Is kept for a second only.
    Passes,
}

/// Most bytes that are kept of a report.
pub(crate) const REPORT_MAX: usize = 2048;

/// For how long a pass is kept.
pub(crate) const PASS_KEPT_MS: u64 = 1000;

/// For how long an owner's lease runs.
pub(crate) const LEASE_MS: u64 = 3000;

/// For how long a question may take.
pub(crate) const QUESTION_MS: u64 = 1000;

impl Operation {
    pub(crate) const ALL: [Self; 6] =
        [Self::Orders, Self::Payments, Self::Reports, Self::Slots, Self::Refunds, Self::Passes];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Orders => "orders.create",
            Self::Payments => "payments.create",
            Self::Reports => "reports.create",
            Self::Slots => "slots.put",
            Self::Refunds => "refunds.create",
            Self::Passes => "passes.create",
        }
    }

    pub(crate) fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|operation| operation.name() == name)
    }

    pub(crate) fn of_target(target: &str) -> Option<Self> {
        let first = target.split(['/', '?']).nth(1)?;
        Self::ALL.into_iter().find(|operation| operation.name().split('.').next() == Some(first))
    }

    /// Whether an unknown outcome lets the next duplicate execute.
    pub(crate) fn retries(self) -> bool {
        self == Self::Payments
    }

    /// Whether the API is asked about an unknown outcome.
    pub(crate) fn asks(self) -> bool {
        self == Self::Refunds
    }

    /// Whether its answers are soon forgotten.
    pub(crate) fn expires(self) -> bool {
        self == Self::Passes
    }
}

pub(crate) const TENANTS: [&str; 3] = ["acme", "bolt", "cora"];

/// A request as far as it is the same request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) put: bool,
    pub(crate) target: String,
    pub(crate) body: String,
}

/// How a client begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    Alone,
    /// The first request is given up after this many milliseconds.
    HangUp(u64),
    /// Two at once through different replicas.
    Twins,
    /// Two at once, one of them with another body.
    Rivals,
}

/// What a client wants to have done once, and how it goes about it.
#[derive(Clone, Debug)]
pub(crate) struct Intent {
    pub(crate) scope: Scope,
    pub(crate) operation: Operation,
    pub(crate) request: Request,
    /// Another request under the same key.
    pub(crate) other: Request,
    pub(crate) opening: Opening,
    /// For each try the replica, and the pause before the next one in milliseconds.
    pub(crate) tries: Vec<(usize, u64)>,
    /// How often it asks again once it has its answer.
    pub(crate) again: usize,
    /// Whether it sends the other request then.
    pub(crate) abuses: bool,
}

/// What the API does with one execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mood {
    pub(crate) delay_ms: u64,
    pub(crate) answer: Said,
    pub(crate) ends: Ends,
    /// Whether it has done what it was asked for: what it knows of afterwards.
    pub(crate) made: bool,
}

/// What the API says to a question about an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The truth.
    Truth,
    /// The truth, too late.
    Late,
    /// The first bytes of the truth.
    Cut,
    /// Something that is no answer, of this status.
    Nonsense(u16, &'static str),
}

/// What the API says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    Created,
    /// A final answer of this status.
    Final(u16),
    /// Has not executed: come again.
    Busy(u16),
    /// Perhaps executed.
    Doubtful(u16),
    /// A report of this many bytes, by length or in chunks.
    Report {
        bytes: usize,
        chunked: bool,
    },
}

/// How far the answer comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ends {
    Whole,
    /// Half of its body.
    Cut,
    /// Not a byte, then FIN.
    Closed,
    /// Not a byte, then RST.
    Reset,
}

/// What the nemesis does to a gateway's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blow {
    Kill {
        gateway: usize,
        down_ms: u64,
    },
    Pause {
        gateway: usize,
        ms: u64,
    },
    /// A clean stop, which has half a second, and a start.
    Restart {
        gateway: usize,
    },
    /// Nobody reads its log, and the pipe is soon full.
    LogStalls {
        gateway: usize,
        ms: u64,
    },
    /// Its log has no reader any more, until it is started anew.
    LogClosed {
        gateway: usize,
    },
}

/// What the nemesis does to the wires, and to the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Break {
    StoreCut {
        gateway: usize,
    },
    StoreAway {
        gateway: usize,
        ms: u64,
    },
    StoreStalls {
        gateway: usize,
        ms: u64,
    },
    /// The database's answer to the next statement of this name is lost.
    StoreMute {
        gateway: usize,
        statement: &'static str,
    },
    ApiCut,
    ApiAway {
        ms: u64,
    },
    ApiStalls {
        ms: u64,
    },
    /// Nobody listens at the API's port: connections are refused.
    ApiDown {
        ms: u64,
    },
    SinkCut,
    SinkAway {
        ms: u64,
    },
    /// The database server is stopped without a shutdown, and is down for a while.
    Crash {
        down_ms: u64,
    },
    /// The same with a shutdown, which ends all connections.
    Stop {
        down_ms: u64,
    },
}

/// A harm, so long after the one before has been done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step<Harm> {
    pub(crate) after_ms: u64,
    pub(crate) harm: Harm,
}

/// Statements whose answers get lost. The names are those that stand in the statements.
const STATEMENTS: [&str; 11] = [
    "-- reserve",
    "-- reserve",
    "-- complete",
    "-- complete",
    "-- release_first",
    "-- mark_unknown",
    "-- take_over_unknown",
    "-- take_over_lookup",
    "-- take_over_expired",
    "-- claim",
    "-- finish",
];

/// A generator for one purpose, from the seed and what names the purpose.
fn random(seed: u64, purpose: &[u64]) -> fastrand::Rng {
    // FNV-1a: stable, and spread well enough by the generator.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for word in std::iter::once(&seed).chain(purpose) {
        for byte in word.to_le_bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    fastrand::Rng::with_seed(hash)
}

/// What client number `client` wants as its `number`th thing, of this many replicas.
pub(crate) fn intent(seed: u64, client: usize, number: usize, replicas: usize) -> Intent {
    let mut random = random(seed, &[1, client as u64, number as u64]);
    // Clients of different tenants use the same keys, and each key for two operations.
    let tenant = TENANTS[client % TENANTS.len()];
    let key = format!("k{}-{}", client / TENANTS.len(), number / 2);
    let all = Operation::ALL;
    // The second use of a key is another operation than the first.
    let place = (random_operation(seed, client, number / 2) + number % 2) % all.len();
    let operation = all[place];
    let (request, other) = requests(operation, &mut random, &format!("{client}-{number}"));
    let opening = match random.u8(0..20) {
        0..10 => Opening::Alone,
        10..14 => Opening::HangUp(random.u64(1..120)),
        14..18 => Opening::Twins,
        _ => Opening::Rivals,
    };
    let tries = (0..14).map(|_| (random.usize(0..replicas), random.u64(20..400))).collect();
    let (again, abuses) = (random.usize(0..3), random.u8(0..4) == 0);
    let scope = Scope::new(tenant, operation.name(), &key);
    Intent { scope, operation, request, other, opening, tries, again, abuses }
}

fn random_operation(seed: u64, client: usize, pair: usize) -> usize {
    random(seed, &[2, client as u64, pair as u64]).usize(0..Operation::ALL.len())
}

fn requests(
    operation: Operation,
    random: &mut fastrand::Rng,
    reference: &str,
) -> (Request, Request) {
    let items: Vec<_> =
        (0..random.usize(0..4)).map(|n| serde_json::json!({ "sku": format!("s{n}") })).collect();
    let body = |amount: u32| {
        serde_json::json!({ "ref": reference, "amount": amount, "items": items }).to_string()
    };
    let amount = random.u32(1..1000);
    let target = match operation {
        Operation::Orders => "/orders".to_owned(),
        Operation::Payments => "/payments?currency=eur".to_owned(),
        Operation::Reports => "/reports".to_owned(),
        Operation::Slots => format!("/slots/{}", random.u8(0..50)),
        Operation::Refunds => "/refunds".to_owned(),
        Operation::Passes => "/passes".to_owned(),
    };
    let put = operation == Operation::Slots;
    let request = Request { put, target: target.clone(), body: body(amount) };
    // Another slot is another request, as another body is.
    let other = if put && random.bool() {
        Request { put, target: format!("{target}0"), body: body(amount) }
    } else {
        Request { put, target, body: body(amount + 1) }
    };
    (request, other)
}

/// How the API answers the `nth` execution of a scope, from 0.
pub(crate) fn mood(seed: u64, scope: &Scope, nth: usize) -> Mood {
    let mut random = random(seed, &about(3, scope, nth));
    let report = scope.operation == Operation::Reports.name();
    let refund = scope.operation == Operation::Refunds.name();
    let answer = match random.u8(0..100) {
        0..70 if report => {
            let bytes = *random.choice(&[90, 2048, 2049, 5000, 20_000]).unwrap_or(&90);
            Said::Report { bytes, chunked: random.bool() }
        }
        0..45 if refund => Said::Created,
        // Often, so that there is something to ask about.
        45..90 if refund => Said::Doubtful(502),
        0..70 => Said::Created,
        70..85 => Said::Final(*random.choice(&[200, 204, 303, 404, 409, 422, 500]).unwrap_or(&200)),
        85..95 => Said::Busy(*random.choice(&[401, 408, 429, 429, 503]).unwrap_or(&429)),
        _ => Said::Doubtful(*random.choice(&[502, 503, 504]).unwrap_or(&503)),
    };
    let ends = match random.u8(0..100) {
        0..93 => Ends::Whole,
        93..96 => Ends::Cut,
        96..98 => Ends::Closed,
        _ => Ends::Reset,
    };
    let delay_ms = match random.u8(0..100) {
        0..60 => random.u64(0..30),
        60..92 => random.u64(30..500),
        92..97 => random.u64(500..1200),
        // Longer than the routes' `timeout`.
        _ => random.u64(1600..2600),
    };
    let made = match (answer, ends) {
        (Said::Busy(_), _) => false,
        (Said::Doubtful(_), _) | (_, Ends::Closed | Ends::Reset) => random.bool(),
        (_, Ends::Whole | Ends::Cut) => true,
    };
    Mood { delay_ms, answer, ends, made }
}

/// What the API says to the `nth` question about a scope, from 0.
pub(crate) fn reply(seed: u64, scope: &Scope, nth: usize) -> Reply {
    let mut random = random(seed, &about(6, scope, nth));
    match random.u8(0..20) {
        0..9 => Reply::Truth,
        9 => Reply::Late,
        10..12 => Reply::Cut,
        12..14 => Reply::Nonsense(500, r#"{"total":0,"items":[]}"#),
        14..16 => Reply::Nonsense(404, r#"{"total":0,"items":[]}"#),
        16..18 => Reply::Nonsense(200, r#"{"total":null}"#),
        _ => Reply::Nonsense(200, "<html>please log in</html>"),
    }
}

/// The purpose of something that is the `nth` of its kind about a scope.
fn about(kind: u64, scope: &Scope, nth: usize) -> Vec<u64> {
    let names = [&scope.tenant, &scope.operation, &scope.key];
    let bytes = names.iter().flat_map(|name| name.bytes().map(u64::from).chain([256]));
    [kind, nth as u64].into_iter().chain(bytes).collect()
}

/// What is done to the processes, for this many milliseconds.
pub(crate) fn processes(seed: u64, gateways: usize, length_ms: u64) -> Vec<Step<Blow>> {
    steps(&mut random(seed, &[4]), length_ms, |random| {
        let gateway = random.usize(0..gateways);
        match random.u8(0..12) {
            0..5 => {
                let down_ms = if random.bool() { 0 } else { random.u64(0..2500) };
                (Blow::Kill { gateway, down_ms }, down_ms + 400)
            }
            5..9 => {
                // The lease is three seconds.
                let ms = random.u64(100..6000);
                (Blow::Pause { gateway, ms }, ms)
            }
            9 => {
                let ms = random.u64(500..4000);
                (Blow::LogStalls { gateway, ms }, ms)
            }
            10 => (Blow::LogClosed { gateway }, 100),
            _ => (Blow::Restart { gateway }, 500),
        }
    })
}

/// What is done to the wires, and to the database server where there is one.
pub(crate) fn wires(
    seed: u64,
    gateways: usize,
    postgres: bool,
    length_ms: u64,
) -> Vec<Step<Break>> {
    steps(&mut random(seed, &[5]), length_ms, |random| {
        let gateway = random.usize(0..gateways);
        let long = if random.bool() { random.u64(100..600) } else { random.u64(600..2500) };
        match random.u8(if postgres { 0..22 } else { 12..22 }) {
            0..2 => (Break::StoreCut { gateway }, 0),
            2..4 => (Break::StoreAway { gateway, ms: long }, long),
            4..6 => (Break::StoreStalls { gateway, ms: long }, long),
            6..11 => {
                let statement = STATEMENTS[random.usize(0..STATEMENTS.len())];
                (Break::StoreMute { gateway, statement }, 0)
            }
            11 => {
                let down_ms = random.u64(0..1500);
                (Break::Crash { down_ms }, down_ms + 300)
            }
            12..14 => (Break::ApiCut, 0),
            14 => (Break::ApiAway { ms: long / 2 }, long / 2),
            15..17 => (Break::ApiStalls { ms: long }, long),
            17..19 => (Break::SinkCut, 0),
            19..21 => (Break::ApiDown { ms: long / 2 }, long / 2),
            _ => (Break::SinkAway { ms: long }, long),
        }
    })
}

/// What is done to the wires where requests may go past a store that is away: mostly that.
pub(crate) fn outages(seed: u64, gateways: usize, length_ms: u64) -> Vec<Step<Break>> {
    steps(&mut random(seed, &[7]), length_ms, |random| {
        let (gateway, ms) = (random.usize(0..gateways), random.u64(100..600));
        match random.u8(0..10) {
            0..6 => (Break::StoreAway { gateway, ms: ms + 600 }, ms + 600),
            6 => (Break::Crash { down_ms: ms }, ms + 300),
            7 => (Break::ApiDown { ms }, ms),
            8 => (Break::ApiStalls { ms }, ms),
            _ => (Break::StoreMute { gateway, statement: "-- reserve" }, 0),
        }
    })
}

/// Steps until their pauses and lengths fill the time.
fn steps<Harm>(
    random: &mut fastrand::Rng,
    length_ms: u64,
    mut choose: impl FnMut(&mut fastrand::Rng) -> (Harm, u64),
) -> Vec<Step<Harm>> {
    let (mut steps, mut at) = (Vec::new(), 0);
    loop {
        let after_ms = random.u64(50..800);
        let (harm, takes) = choose(random);
        at += after_ms + takes;
        if at > length_ms {
            return steps;
        }
        steps.push(Step { after_ms, harm });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::{ON_POSTGRES, ON_SQLITE};
    use super::*;

    fn kinds<Harm: std::fmt::Debug>(steps: &[Step<Harm>]) -> BTreeSet<String> {
        let name = |step: &Step<Harm>| format!("{:?}", step.harm);
        steps.iter().map(name).map(|name| name.split(' ').next().unwrap().to_owned()).collect()
    }

    #[test]
    fn the_fixed_seeds_do_every_kind_of_harm() {
        let (seed, ms) = (ON_POSTGRES.seed, ON_POSTGRES.seconds * 1000);
        assert_eq!(kinds(&processes(seed, 2, ms)).len(), 5);
        assert_eq!(kinds(&wires(seed, 2, true, ms)).len(), 11);
        let (seed, ms) = (ON_SQLITE.seed, ON_SQLITE.seconds * 1000);
        assert_eq!(kinds(&processes(seed, 1, ms)).len(), 5);
        assert_eq!(kinds(&wires(seed, 1, false, ms)).len(), 6);
    }

    #[test]
    fn a_plan_follows_from_its_seed_alone() {
        let plan = |seed| {
            let intents = (0..20).map(|n| format!("{:?}", intent(seed, 3, n, 2)));
            let moods = (0..5).map(|n| format!("{:?}", mood(seed, &Scope::new("t", "o", "k"), n)));
            let steps = wires(seed, 2, true, 9000).into_iter().map(|step| format!("{step:?}"));
            intents.chain(moods).chain(steps).collect::<Vec<_>>()
        };
        assert_eq!(plan(1), plan(1));
        assert_ne!(plan(1), plan(2));
    }

    #[test]
    fn no_two_intents_share_a_scope() {
        let scopes: BTreeSet<_> =
            (0..9).flat_map(|c| (0..40).map(move |n| intent(5, c, n, 2).scope)).collect();
        assert_eq!(scopes.len(), 9 * 40);
    }
}
