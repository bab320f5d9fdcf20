//! A checker in the manner of Jepsen: random clients, an API and a sink of moods, real gateways, and a nemesis; then the
//! whole history is judged.
//!
//! Everything that is decided follows from the seed; when it happens, among real processes, does not. To repeat a run:
//! `ONCEGATE_CHECK_SEED=7 ONCEGATE_CHECK_SECONDS=20 cargo test --test it checker::on_`. A long run has many seconds.

mod api;
mod clients;
pub(crate) mod history;
mod judge;
mod lives;
pub(crate) mod nemesis;
pub(crate) mod plan;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;

use self::api::Api;
use self::clients::Clients;
use self::history::{Act, Clock, Delivery, Event, History, Row, Scope, Told};
use self::judge::{Violation, plain};
use self::nemesis::{Notes, Operators, Processes, Wires};
use self::plan::{Intent, LEASE_MS, Operation, PASS_KEPT_MS, QUESTION_MS, REPORT_MAX};
use crate::support::fault::Fault;
use crate::support::postgres::Cluster;
use crate::support::process::{self, eventually};
use crate::support::rig::{Place, Which};
use crate::support::sink::{Act as Does, OK, SECRET, Sink};

const CLIENTS: usize = 10;

/// A run that `cargo test` makes.
pub(crate) struct Fixed {
    pub(crate) seed: u64,
    pub(crate) seconds: u64,
}

pub(crate) const ON_POSTGRES: Fixed = Fixed { seed: 16, seconds: 20 };
pub(crate) const ON_SQLITE: Fixed = Fixed { seed: 33, seconds: 15 };

pub(crate) const PAST_POSTGRES: Fixed = Fixed { seed: 40, seconds: 8 };

/// What becomes of requests while the store is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Away {
    Refused,
    Bypassed,
}

#[tokio::test(flavor = "multi_thread")]
async fn on_postgres_every_promise_holds_under_all_harm() {
    check(Which::Postgres, Away::Refused, 2, ON_POSTGRES).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_sqlite_every_promise_holds_under_all_harm() {
    check(Which::Sqlite, Away::Refused, 1, ON_SQLITE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn past_postgres_goes_only_what_says_so_and_all_else_keeps_every_promise() {
    check(Which::Postgres, Away::Bypassed, 2, PAST_POSTGRES).await;
}

pub(crate) fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// One run, judged. Seed, seconds and the number of replicas can be set from outside.
async fn check(which: Which, away: Away, replicas: usize, fixed: Fixed) {
    let seed = from_environment("ONCEGATE_CHECK_SEED").unwrap_or(fixed.seed);
    let seconds = from_environment("ONCEGATE_CHECK_SECONDS").unwrap_or(fixed.seconds);
    let replicas = match which {
        Which::Postgres => {
            from_environment("ONCEGATE_CHECK_REPLICAS").map_or(replicas, |n| n as usize)
        }
        Which::Sqlite => replicas,
    };
    let history = run(which, away, replicas, seed, seconds).await;
    eprintln!("{which:?}, {away:?}, seed {seed}, {seconds} s: {}", summary(&history));
    let violations = judge::judge(&history);
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("checker-{which:?}-{away:?}-{seed}.history").to_lowercase());
    if !violations.is_empty() || from_environment("ONCEGATE_CHECK_KEEP").is_some() {
        std::fs::write(&file, report(&violations) + &history.text()).expect("the history is kept");
    }
    if !violations.is_empty() {
        let test = if away == Away::Refused { "on" } else { "past" };
        panic!(
            "{} violations:\n{}\nThe history is in {}. Again:\n\
             ONCEGATE_CHECK_SEED={seed} ONCEGATE_CHECK_SECONDS={seconds} ONCEGATE_CHECK_REPLICAS={replicas} \
             cargo test --test it checker::{test}_{}",
            violations.len(),
            report(&violations[..violations.len().min(20)]),
            file.display(),
            format!("{which:?}").to_lowercase(),
        );
    }
    // A run in which little happens shows nothing.
    let kept = history.ops.iter().filter(|op| matches!(&op.told, Told::Answer(a) if a.kept()));
    let (kept, past) =
        (kept.count(), history.executions.iter().filter(|run| run.record.is_empty()));
    let enough = match away {
        Away::Refused => kept >= 10 && !history.past.is_empty() && !history.questions.is_empty(),
        Away::Bypassed => kept > 0 && past.count() > 0,
    };
    assert!(enough || seconds < fixed.seconds, "{}", summary(&history));
}

fn report(violations: &[Violation]) -> String {
    violations.iter().map(|found| format!("{:?}: {}\n", found.rule, found.about)).collect()
}

/// How often what was answered, and how the records stand.
fn summary(history: &History) -> String {
    let mut told: BTreeMap<String, usize> = BTreeMap::new();
    for op in &history.ops {
        let name = match &op.told {
            Told::Nothing(_) => "nothing".to_owned(),
            Told::Answer(answer) => answer.problem().unwrap_or_else(|| match answer {
                answer if answer.bypassed() => "bypassed".to_owned(),
                answer if answer.replayed() => "replayed".to_owned(),
                answer if answer.kept() => "kept".to_owned(),
                answer if answer.not_stored() => "not stored".to_owned(),
                _ => "passed on".to_owned(),
            }),
        };
        *told.entry(name).or_default() += 1;
    }
    let mut rows: BTreeMap<&str, usize> = BTreeMap::new();
    for row in &history.rows {
        *rows.entry(&row.status).or_default() += 1;
    }
    format!(
        "{} requests {told:?}, {} executions, {} questions, {} expired, {} acts by hand, records {rows:?}, {} events, {} deliveries, {} starts",
        history.ops.len(),
        history.executions.len(),
        history.questions.len(),
        history.past.len(),
        history.acts.len(),
        history.events.len(),
        history.deliveries.len(),
        history.logs.len(),
    )
}

/// All parts of a run.
struct World {
    seed: u64,
    clock: Clock,
    place: Place,
    which: Which,
    away: Away,
    api: Api,
    sink: Sink,
    /// Whether the sink has taken what came, by its number.
    taken: Arc<Mutex<Vec<bool>>>,
    wires: Wires,
    processes: Processes,
    clients: Arc<Clients>,
    notes: Notes,
    operators: Operators,
    restless: Vec<String>,
}

async fn run(which: Which, away: Away, replicas: usize, seed: u64, seconds: u64) -> History {
    let mut world = World::start(which, away, replicas, seed).await;
    lives::watch(&world.place, which).await;
    let intents = world.storm(seconds).await;
    world.api.calm();
    world.rest("after the storm").await;
    // Through the replicas that have seen it all.
    world.probe(&intents).await;
    world.rest("after the questions").await;
    // And through processes that remember nothing. What the old ones still owed ends with them.
    for gateway in 0..world.processes.gateways.len() {
        world.processes.revive(gateway).await;
    }
    world.rest("after the restart").await;
    world.probe(&intents).await;
    world.rest("at the end").await;
    world.end().await
}

/// A sink that mostly takes what comes, and writes down for each request whether it has.
async fn moody_sink(seed: u64) -> (Sink, Arc<Mutex<Vec<bool>>>) {
    let taken = Arc::new(Mutex::new(Vec::new()));
    let ours = Arc::clone(&taken);
    let sink = Sink::start(move |_, count| {
        let mut random = fastrand::Rng::with_seed(seed ^ (count as u64).wrapping_mul(0x9e37_79b9));
        let (does, takes) = match random.u8(0..100) {
            0..60 => (OK, true),
            60..85 => (Does::After(Duration::from_millis(random.u64(1..40)), Box::new(OK)), true),
            85..90 => (Does::Answer(500, ""), false),
            90..92 => (Does::Answer(503, "retry-after: 1\r\n"), false),
            92..95 => (Does::Fin(""), false),
            95..98 => (Does::Rst(""), false),
            // Longer than its time-out: it has it, and the relay cannot know.
            _ => (Does::After(Duration::from_millis(900), Box::new(OK)), true),
        };
        ours.lock().unwrap().push(takes);
        does
    })
    .await;
    (sink, taken)
}

/// The configuration of a gateway by its number.
fn config(number: usize, database: &str, away: Away, api: &Fault, sink: &Fault) -> String {
    let port = process::free_port();
    let on_unavailable = if away == Away::Bypassed { "bypass" } else { "refuse" };
    format!(
        r#"
[server]
listen = "127.0.0.1:{port}"
shutdown_grace = "2s"
in_flight_max = 12
[admin]
listen = "127.0.0.1:0"
[upstream]
url = "http://{api}"
[store]
url = "{database}"
lease = "{LEASE_MS}ms"
sweep_every = "300ms"
timeout = "1s"
connect_timeout = "1s"
reserve_timeout = "1500ms"
completion_timeout = "600ms"
on_unavailable = "{on_unavailable}"
[policy]
tenant = {{ header = "X-Tenant-Id" }}
timeout = "1500ms"
late_answer = "3s"
wait = "1s"
[[route]]
method = "POST"
path = "/orders"
operation = "orders.create"
[[route.event]]
type = "order.created"
when = "response.status == 201"
payload = {{ order = "{{{{ response.json.id }}}}", ref = "{{{{ request.json.ref }}}}", amount = "{{{{ request.json.amount }}}}" }}
[[route.event]]
type = "audit.order"
payload = {{ status = "{{{{ response.status }}}}", key = "{{{{ key }}}}" }}
[[route.event]]
type = "order.item"
for_each = "request.json.items"
event_key = "{{{{ item.sku }}}}"
payload = {{ sku = "{{{{ item.sku }}}}", ref = "{{{{ request.json.ref }}}}" }}
[[route]]
method = "POST"
path = "/payments"
operation = "payments.create"
on_unknown = "retry"
[[route]]
method = "POST"
path = "/reports"
operation = "reports.create"
max_response_body = {REPORT_MAX}
[[route]]
method = "PUT"
path = "/slots/{{slot}}"
operation = "slots.put"
wait = "100ms"
[[route.event]]
type = "slot.put"
payload = {{ status = "{{{{ response.status }}}}", ref = "{{{{ request.json.ref }}}}" }}
[[route]]
method = "POST"
path = "/refunds"
operation = "refunds.create"
on_unknown = "lookup"
[route.lookup]
path = "/refunds?ref={{{{ key }}}}&tenant={{{{ tenant }}}}"
headers = {{ X-Gateway = "{number}" }}
found = "response.json.total > 0"
status = 201
body = "{{{{ response.json.items[0] }}}}"
# Longer than anything on its way to the API is held up.
settle = "3s"
timeout = "{QUESTION_MS}ms"
[[route.event]]
type = "refund.made"
when = "response.status == 201"
payload = {{ refund = "{{{{ response.json.id }}}}", ref = "{{{{ request.json.ref }}}}" }}
[[route]]
method = "POST"
path = "/passes"
operation = "passes.create"
retention = "{PASS_KEPT_MS}ms"
[[sink]]
name = "main"
url = "http://{sink}/hook"
secret = "{SECRET}"
timeout = "500ms"
allow_private = true
backoff = {{ base = "100ms", max = "500ms" }}
"#,
        api = api.addr,
        sink = sink.addr,
    )
}

impl World {
    async fn start(which: Which, away: Away, replicas: usize, seed: u64) -> Self {
        let clock = Clock(std::time::Instant::now());
        let (cluster, place) = match which {
            Which::Sqlite => (None, Place::new(which).await),
            Which::Postgres => {
                let cluster = Arc::new(nemesis::beside(Cluster::own).await);
                let place = Place::at(cluster.database());
                (Some(cluster), place)
            }
        };
        let (api, (sink, taken)) = (Api::start(seed, clock).await, moody_sink(seed).await);
        let to_api = Fault::before(api.upstream.addr).await;
        let to_sink = Fault::before(([127, 0, 0, 1], sink.port).into()).await;
        let folder = place.folder.path();
        let (mut stores, mut gateways, mut logs) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..replicas {
            let mut url = place.url.clone();
            if let Some(cluster) = &cluster {
                let (fault, beyond) = Fault::before_postgres(&place.url, cluster.port()).await;
                stores.push(fault);
                url = beyond;
            }
            let toml = config(number, &url, away, &to_api, &to_sink);
            let config = process::config(folder, &toml);
            gateways.push(nemesis::start(config, &mut logs).await);
        }
        let direct = config(replicas, &place.url, away, &to_api, &to_sink);
        let (notes, addrs) =
            (Notes::new(clock), gateways.iter().map(|gateway| gateway.addr).collect());
        let operators = Operators {
            random: fastrand::Rng::with_seed(seed ^ 0x6f70),
            config: process::config(folder, &direct),
            notes: notes.clone(),
            by_hand: Vec::new(),
        };
        Self {
            seed,
            clock,
            which,
            away,
            api,
            sink,
            taken,
            wires: Wires { stores, api: to_api, sink: to_sink, cluster },
            processes: Processes { gateways, logs, sleeps: Vec::new() },
            clients: Clients::new(seed, clock, addrs),
            place,
            notes,
            operators,
            restless: Vec::new(),
        }
    }

    /// Clients, nemesis and operators, all at once. What the clients intended.
    async fn storm(&mut self, seconds: u64) -> Vec<Intent> {
        let clients = (0..CLIENTS).map(|n| tokio::spawn(Arc::clone(&self.clients).live(n)));
        let clients: Vec<_> = clients.collect();
        let (replicas, length) = (self.processes.gateways.len(), seconds * 1000);
        let end = Instant::now() + Duration::from_secs(seconds);
        let postgres = self.which == Which::Postgres;
        let to_processes = plan::processes(self.seed, replicas, length);
        let to_wires = match self.away {
            Away::Refused => plan::wires(self.seed, replicas, postgres, length),
            Away::Bypassed => plan::outages(self.seed, replicas, length),
        };
        let (over, notes) = (Arc::clone(&self.clients), &self.notes);
        tokio::join!(
            self.processes.harm(&to_processes, notes, end),
            self.wires.harm(&to_wires, notes, end),
            self.operators.work(end),
            async {
                tokio::time::sleep_until(end).await;
                over.over.store(true, Ordering::SeqCst);
            },
        );
        let intents = join_all(clients).await;
        intents.into_iter().flat_map(|intents| intents.expect("a client lives")).collect()
    }

    /// Waits until nothing is in progress and nothing is owed. What does not come to rest is a finding, not a failure
    /// of the run.
    async fn rest(&mut self, when: &str) {
        self.notes.note(format!("rest {when}"));
        let open = "select count(*) from idempotency_records where status = 'in_progress'";
        let owed = "select count(*) from outbox_events where status = 'pending'";
        for (what, sql) in [("records in progress", open), ("events pending", owed)] {
            let end = Instant::now() + process::PATIENCE;
            while self.place.count(sql).await != 0 {
                if Instant::now() >= end {
                    let count = self.place.count(sql).await;
                    self.restless.push(format!("{when}: {count} {what}"));
                    break;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        self.found_out(when).await;
        for addr in self.clients.gateways.clone() {
            eventually("the gateway serves", async || nemesis::serves(addr).await).await;
        }
    }

    /// Waits until the API has been asked about all that it would find. What one has to wait for after questions that failed
    /// is left out.
    async fn found_out(&mut self, when: &str) {
        let soon = "update oncegate_unknown set next_ask_at = since where next_ask_at > since";
        let sql = format!(
            "select id from idempotency_records where status = 'unknown' and operation = '{}'",
            Operation::Refunds.name()
        );
        let ledger = self.api.ledger().into_iter().filter(|run| run.made);
        let made: BTreeSet<String> = ledger.map(|run| run.record).collect();
        let end = Instant::now() + process::PATIENCE;
        loop {
            let rows = self.place.rows(&sql).await;
            let left = rows.iter().filter(|row| made.contains(&text(row, 0))).count();
            if left == 0 {
                return;
            }
            if Instant::now() >= end {
                self.restless.push(format!("{when}: {left} executions nobody asks about"));
                return;
            }
            self.place.rows(soon).await;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Everything that was intended once more, each through some replica.
    async fn probe(&self, intents: &[Intent]) {
        const AT_ONCE: usize = 8;
        let asks = (0..AT_ONCE).map(|lane| async move {
            for intent in intents.iter().skip(lane).step_by(AT_ONCE) {
                let gateway = intent.tries.last().map_or(0, |(replica, _)| *replica);
                self.clients.ask(&intent.scope, &intent.request, gateway).await;
            }
        });
        join_all(asks).await;
    }

    /// Stops everything and collects what there is.
    async fn end(mut self) -> History {
        for gateway in &mut self.processes.gateways {
            gateway.kill9();
            self.processes.logs.push(gateway.log());
        }
        let mut by_hand: BTreeMap<String, Vec<history::Answer>> = BTreeMap::new();
        for (record, answer) in std::mem::take(&mut self.operators.by_hand) {
            by_hand.entry(record).or_default().push(answer);
        }
        let (seen, taken) = (self.sink.seen(), self.taken.lock().unwrap().clone());
        let rows = self.rows().await;
        let (lives, past) = lives::read(&self.place, self.which, self.clock, &rows).await;
        History {
            ops: self.clients.ops(),
            executions: self.api.ledger(),
            questions: self.api.questions(),
            sleeps: std::mem::take(&mut self.processes.sleeps),
            bypass: self.away == Away::Bypassed,
            acts: self.acts().await,
            by_hand,
            rows,
            past,
            lives,
            events: self.events().await,
            deliveries: seen
                .into_iter()
                .zip(taken)
                .map(|(seen, taken)| Delivery {
                    id: plain(&seen.id()),
                    verified: seen.verified,
                    body: seen.body,
                    taken,
                })
                .collect(),
            restless: self.restless,
            logs: self.processes.logs,
            notes: self.notes.lines(),
        }
    }

    async fn acts(&self) -> Vec<(String, Act)> {
        let sql = "select record_id, action from audit_log where action like 'record.%'";
        let act = |row: Vec<Option<String>>| {
            let act = if text(&row, 1) == "record.release" { Act::Release } else { Act::Complete };
            (text(&row, 0), act)
        };
        self.place.rows(sql).await.into_iter().map(act).collect()
    }

    async fn rows(&self) -> Vec<Row> {
        let sql = format!(
            "select tenant_id, operation, key, id, attempt, status, response_status, {}, {} from idempotency_records",
            hex(self.which, "response_headers"),
            hex(self.which, "response_body"),
        );
        self.place.rows(&sql).await.iter().map(|row| row_of(row)).collect()
    }

    async fn events(&self) -> Vec<Event> {
        let sql = format!(
            "select id, record_id, tenant_id, operation, idempotency_key, event_type, status, {} from outbox_events",
            hex(self.which, "payload"),
        );
        let event = |row: Vec<Option<String>>| Event {
            id: plain(&text(&row, 0)),
            record: text(&row, 1),
            scope: Scope::new(&text(&row, 2), &text(&row, 3), &text(&row, 4)),
            kind: text(&row, 5),
            status: text(&row, 6),
            payload: bytes(&text(&row, 7)),
        };
        self.place.rows(&sql).await.into_iter().map(event).collect()
    }
}

/// A column's bytes as hexadecimal text, in a store's words.
fn hex(which: Which, column: &str) -> String {
    match which {
        Which::Sqlite => format!("case when {column} is null then null else hex({column}) end"),
        Which::Postgres => format!("encode({column}, 'hex')"),
    }
}

/// Of the cells of scope, id, attempt, status, and the answer's status, headers and body.
fn row_of(row: &[Option<String>]) -> Row {
    Row {
        scope: Scope::new(&text(row, 0), &text(row, 1), &text(row, 2)),
        record: text(row, 3),
        attempt: text(row, 4).parse().expect("a number"),
        status: text(row, 5),
        answer: row[6].as_ref().map(|status| {
            let headers = String::from_utf8(bytes(row[7].as_deref().unwrap_or_default()));
            let body = row[8].as_deref().map(bytes);
            (status.parse().expect("a status"), lines(&headers.expect("text")), body)
        }),
    }
}

fn text(row: &[Option<String>], column: usize) -> String {
    row[column].clone().unwrap_or_default()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        hex.chars().map(|digit| digit.to_digit(16).expect("a hexadecimal digit") as u8).collect();
    digits.chunks(2).map(|pair| pair[0] * 16 + pair[1]).collect()
}

/// The lines of a stored header block.
fn lines(block: &str) -> Vec<(String, String)> {
    let pairs = block.split("\r\n").filter_map(|line| line.split_once(": "));
    pairs.map(|(name, value)| (name.to_lowercase(), value.to_owned())).collect()
}
