//! What a run leaves behind: every request with its answer, the API's ledger, the tables, and what the sink received.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Instant;

use crate::support::client;

/// Whose key for which operation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Scope {
    pub(crate) tenant: String,
    pub(crate) operation: String,
    pub(crate) key: String,
}

impl Scope {
    pub(crate) fn new(tenant: &str, operation: &str, key: &str) -> Self {
        Self { tenant: tenant.into(), operation: operation.into(), key: key.into() }
    }
}

impl std::fmt::Display for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}", self.tenant, self.operation, self.key)
    }
}

/// Microseconds since the run began, for all that is written down.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(pub(crate) Instant);

impl Clock {
    pub(crate) fn now(self) -> u64 {
        self.0.elapsed().as_micros() as u64
    }
}

/// An answer: what the API sent, what a caller got, what a row holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl From<client::Answer> for Answer {
    fn from(answer: client::Answer) -> Self {
        let text = |value: &http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into();
        let headers = answer.headers.iter();
        Self {
            status: answer.status.as_u16(),
            headers: headers.map(|(name, value)| (name.as_str().into(), text(value))).collect(),
            body: answer.body.to_vec(),
        }
    }
}

/// What the next hop makes, or what is different in each sending of one answer.
const NOT_COMPARED: [&str; 7] = [
    "connection",
    "content-length",
    "date",
    "idempotent-replayed",
    "set-cookie",
    "transfer-encoding",
    "via",
];

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut found = self.headers.iter().filter(|(known, _)| known == name);
        found.next().map(|(_, value)| value.as_str())
    }

    /// The name of the gateway's own answer.
    pub(crate) fn problem(&self) -> Option<String> {
        if self.header("content-type") != Some("application/problem+json") {
            return None;
        }
        let json: serde_json::Value = serde_json::from_slice(&self.body).ok()?;
        json["type"].as_str()?.strip_prefix("urn:oncegate:problem:").map(str::to_owned)
    }

    pub(crate) fn record(&self) -> Option<&str> {
        self.header("oncegate-record")
    }

    pub(crate) fn replayed(&self) -> bool {
        self.header("idempotent-replayed").is_some()
    }

    /// Whether it says that it is kept: the same will be answered again.
    pub(crate) fn kept(&self) -> bool {
        self.header("oncegate-expires").is_some()
    }

    /// Whether it says that it is not kept yet.
    pub(crate) fn not_stored(&self) -> bool {
        self.header("oncegate-stored").is_some()
    }

    /// The headers that must be the same in every sending, those of one name in their order.
    pub(crate) fn end_to_end(&self) -> Vec<(&str, &str)> {
        let mut headers: Vec<_> = self
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .filter(|(name, _)| !NOT_COMPARED.contains(name) && !name.starts_with("oncegate-"))
            .collect();
        headers.sort_by_key(|(name, _)| *name);
        headers
    }

    /// Whether it says that nothing protected its request.
    pub(crate) fn bypassed(&self) -> bool {
        self.header("oncegate-bypassed").is_some()
    }

    /// In one line.
    pub(crate) fn brief(&self) -> String {
        let problem = self.problem();
        let said = ["x-execution", "x-operator", "oncegate-record", "oncegate-stored"];
        let said = said.iter().filter_map(|name| Some(format!("{name}={}", self.header(name)?)));
        let mut words: Vec<_> = problem.into_iter().chain(said).collect();
        words.extend(self.kept().then(|| "kept".to_owned()));
        words.extend(self.replayed().then(|| "replayed".to_owned()));
        words.extend(self.bypassed().then(|| "bypassed".to_owned()));
        format!("{} {} ({} bytes)", self.status, words.join(" "), self.body.len())
    }
}

/// What a request was told.
#[derive(Clone, Debug)]
pub(crate) enum Told {
    Answer(Answer),
    /// No whole answer: it hung up, nobody was there, or the answer broke off.
    Nothing(String),
}

/// One request of a client.
#[derive(Clone, Debug)]
pub(crate) struct Op {
    /// Sent along as `X-Op`, which no fingerprint reads.
    pub(crate) id: u64,
    pub(crate) gateway: usize,
    pub(crate) scope: Scope,
    pub(crate) target: String,
    pub(crate) body: String,
    pub(crate) invoked: u64,
    pub(crate) ended: u64,
    pub(crate) told: Told,
}

/// One request that the API has read whole: from then on it may have executed.
#[derive(Clone, Debug)]
pub(crate) struct Execution {
    /// Counted from 1; stands in the answer.
    pub(crate) number: u64,
    pub(crate) op: u64,
    pub(crate) scope: Scope,
    pub(crate) target: String,
    pub(crate) body: String,
    /// Empty: it came past the store.
    pub(crate) record: String,
    pub(crate) attempt: u64,
    pub(crate) at: u64,
    pub(crate) answer: Answer,
    /// Whether the API sends all of the answer.
    pub(crate) whole: bool,
    /// Whether the API has done it, and finds it when it is asked.
    pub(crate) made: bool,
}

/// A question about a scope that the API was asked.
#[derive(Clone, Debug)]
pub(crate) struct Question {
    pub(crate) scope: Scope,
    /// Who asked.
    pub(crate) gateway: usize,
    pub(crate) at: u64,
    pub(crate) told: Asked,
}

/// What a question was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// This execution.
    Found(u64),
    NotFound,
    /// Nothing that may be taken for an answer. (What comes late may be: whoever sleeps meanwhile has it in time.)
    Nothing,
}

/// A process that slept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sleep {
    pub(crate) gateway: usize,
    pub(crate) since: u64,
    pub(crate) until: u64,
}

/// The times of a record by the database's clock, in microseconds since the run began.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Life {
    pub(crate) made: i64,
    /// Of a completed one.
    pub(crate) expires: Option<i64>,
    /// When its row was deleted, or taken by another record.
    pub(crate) gone: Option<i64>,
}

/// What an operator did, as the audit table says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Release,
    Complete,
}

/// A row of `idempotency_records`.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) scope: Scope,
    pub(crate) record: String,
    pub(crate) attempt: u64,
    pub(crate) status: String,
    /// Of a completed one.
    pub(crate) answer: Option<Stored>,
}

/// A completed row's answer: status, headers, and the body where it is retained.
pub(crate) type Stored = (u16, Vec<(String, String)>, Option<Vec<u8>>);

/// A row of `outbox_events`.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) id: String,
    pub(crate) record: String,
    pub(crate) scope: Scope,
    pub(crate) kind: String,
    pub(crate) status: String,
    pub(crate) payload: Vec<u8>,
}

/// One request that the sink received.
#[derive(Clone, Debug)]
pub(crate) struct Delivery {
    pub(crate) id: String,
    pub(crate) body: Vec<u8>,
    pub(crate) verified: bool,
    /// Whether the sink answered that it has it.
    pub(crate) taken: bool,
}

/// All of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    pub(crate) ops: Vec<Op>,
    pub(crate) executions: Vec<Execution>,
    pub(crate) questions: Vec<Question>,
    pub(crate) sleeps: Vec<Sleep>,
    /// Whether requests may go past a store that is away.
    pub(crate) bypass: bool,
    pub(crate) acts: Vec<(String, Act)>,
    /// What operators wanted to complete records with, by record: each answer that was tried.
    pub(crate) by_hand: BTreeMap<String, Vec<Answer>>,
    pub(crate) rows: Vec<Row>,
    /// The rows of completed records that are gone, as they were when they were completed.
    pub(crate) past: Vec<Row>,
    /// By record.
    pub(crate) lives: BTreeMap<String, Life>,
    pub(crate) events: Vec<Event>,
    pub(crate) deliveries: Vec<Delivery>,
    /// What did not come to rest in time.
    pub(crate) restless: Vec<String>,
    /// Output of every gateway process.
    pub(crate) logs: Vec<String>,
    /// What the nemesis and the operators did, and when.
    pub(crate) notes: Vec<(u64, String)>,
}

impl History {
    /// Everything in the order of time, then the tables, then the logs.
    pub(crate) fn text(&self) -> String {
        let mut lines: Vec<(u64, String)> = self.notes.clone();
        for op in &self.ops {
            let Op { id, gateway, scope, target, invoked, ended, .. } = op;
            lines.push((*invoked, format!("op {id} {scope} -> g{gateway} {target} {}", op.body)));
            let told = match &op.told {
                Told::Answer(answer) => answer.brief(),
                Told::Nothing(why) => format!("nothing: {why}"),
            };
            lines.push((*ended, format!("op {id} {scope} <- {told}")));
        }
        for run in &self.executions {
            let Execution { number, op, scope, record, attempt, whole, made, .. } = run;
            let status = run.answer.status;
            let text = format!(
                "execution {number} of op {op} {scope} record {record} attempt {attempt}: {status} whole={whole} made={made}"
            );
            lines.push((run.at, text));
        }
        for Question { scope, gateway, at, told } in &self.questions {
            lines.push((*at, format!("question of g{gateway} about {scope}: {told:?}")));
        }
        lines.sort();
        let mut text = String::new();
        for (at, line) in lines {
            let _ = writeln!(text, "{:>10.3} ms  {line}", at as f64 / 1000.0);
        }
        for row in self.rows.iter().chain(&self.past) {
            let Row { scope, record, attempt, status, .. } = row;
            let life = self.lives.get(record);
            let _ = writeln!(text, "row {scope} {record} attempt {attempt} {status} {life:?}");
        }
        for (record, act) in &self.acts {
            let _ = writeln!(text, "audit {record} {act:?}");
        }
        for event in &self.events {
            let Event { id, record, scope, kind, status, .. } = event;
            let _ = writeln!(text, "event {id} {kind} of {scope} {record} {status}");
        }
        for (number, log) in self.logs.iter().enumerate() {
            let _ = writeln!(text, "--- log {number}\n{log}");
        }
        text
    }
}
