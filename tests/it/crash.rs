//! The promise under `kill -9`: clients that retry with their key, and a gateway that is killed again and again; then
//! two of them, which also sleep beyond their lease, on a Postgres that is killed too. `SEED=n` repeats the choices.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::JoinHandle;

use crate::support::client::Answer;
use crate::support::fleet::{self, TWO_EVENTS, order};
use crate::support::orders::Orders;
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Which, on_both_stores};
use crate::support::sink::{Act, OK, Sink};

const KILLS: usize = 12;
const CLIENTS: usize = 6;

on_both_stores! {
    a_gateway_that_is_killed_again_and_again_keeps_its_promises,
}

/// What the clients learned: by key, every final answer.
pub(crate) type Learned = BTreeMap<String, Vec<Answer>>;

async fn a_gateway_that_is_killed_again_and_again_keeps_its_promises(which: Which) {
    let mut random = random();
    let (orders, sink) = api_and_sink().await;
    let place = Place::new(which).await;
    let mut gateway = start(&config(&place, &orders, &sink));
    let clients = Clients::start(&[gateway.addr]);
    for _ in 0..KILLS {
        pass(random.u64(50..600)).await;
        gateway.kill9();
        gateway = start(&gateway.config);
    }
    let learned = clients.end().await;
    gateway.kill9();
    gateway = start(&gateway.config);
    settle_and_judge(&orders, &place, &sink, &gateway, &learned).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_and_database_that_are_killed_and_sleep_keep_the_promises() {
    let mut random = random();
    let (orders, sink) = api_and_sink().await;
    let cluster = tokio::task::block_in_place(Cluster::own);
    let place = Place::at(cluster.database());
    let mut gateways: Vec<_> = (0..2).map(|_| start(&config(&place, &orders, &sink))).collect();
    let clients = Clients::start(&[gateways[0].addr, gateways[1].addr]);
    for _ in 0..KILLS {
        pass(random.u64(50..600)).await;
        let gateway = random.usize(0..gateways.len());
        match random.u8(0..4) {
            0 | 1 => {
                gateways[gateway].kill9();
                gateways[gateway] = start(&gateways[gateway].config);
            }
            2 => {
                gateways[gateway].signal("STOP");
                // The lease is three seconds.
                pass(random.u64(500..4500)).await;
                gateways[gateway].signal("CONT");
            }
            _ => {
                cluster.kill9();
                pass(random.u64(0..1000)).await;
                tokio::task::block_in_place(|| cluster.start());
            }
        }
    }
    let learned = clients.end().await;
    for gateway in &mut gateways {
        gateway.kill9();
    }
    let gateway = start(&gateways[0].config);
    settle_and_judge(&orders, &place, &sink, &gateway, &learned).await;
}

pub(crate) fn random() -> fastrand::Rng {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));
    eprintln!("SEED={seed}");
    fastrand::Rng::with_seed(seed)
}

/// Both take a moment for each request, so that there is always something in flight.
pub(crate) async fn api_and_sink() -> (Orders, Sink) {
    let orders = Orders::start().await;
    orders.pace(Duration::from_millis(30));
    (orders, Sink::start(|_, _| Act::After(Duration::from_millis(10), Box::new(OK))).await)
}

/// A gateway that always comes back on the same port.
pub(crate) fn config(place: &Place, orders: &Orders, sink: &Sink) -> PathBuf {
    let store = "lease = \"3s\"\nsweep_every = \"500ms\"";
    let listen = format!("127.0.0.1:{}", process::free_port());
    let more = format!("{TWO_EVENTS}{}", fleet::sink(sink.port));
    let toml = rig::config_at(place, &orders.url(), &listen, store, "wait = \"100ms\"", &more);
    process::config(place.folder.path(), &toml)
}

pub(crate) fn start(config: &Path) -> Gateway {
    tokio::task::block_in_place(|| Gateway::start(config))
}

/// The random moment between two faults.
pub(crate) async fn pass(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

pub(crate) async fn settle_and_judge(
    orders: &Orders,
    place: &Place,
    sink: &Sink,
    gateway: &Gateway,
    learned: &Learned,
) {
    let open = "select count(*) from idempotency_records where status = 'in_progress'";
    eventually("what the dead left is judged", async || place.count(open).await == 0).await;
    let owed = "select count(*) from outbox_events where status <> 'sent'";
    eventually("the outbox is drained", async || place.count(owed).await == 0).await;

    judge(orders, place, sink, learned).await;
    replays(orders, place, gateway, learned).await;
}

pub(crate) struct Clients {
    tasks: Vec<JoinHandle<Learned>>,
    over: Arc<AtomicBool>,
}

impl Clients {
    pub(crate) fn start(to: &[SocketAddr]) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let client = |number| tokio::spawn(client(number, to.to_vec(), Arc::clone(&over)));
        Self { tasks: (0..CLIENTS).map(client).collect(), over }
    }

    /// No new keys; those that are begun are brought to their end.
    pub(crate) async fn end(self) -> Learned {
        self.over.store(true, Ordering::SeqCst);
        let mut learned = Learned::new();
        for task in self.tasks {
            learned.extend(task.await.expect("a client"));
        }
        learned
    }
}

/// Whether this answer promises that the execution is remembered.
fn binds(answer: &Answer) -> bool {
    answer.status.is_success() && answer.header("oncegate-stored") != Some("false")
}

/// Whether it comes from the database, so that every later answer does. One that is in the spill of a replica that is dead
/// or asleep is unknown to the others until that is drained.
fn stored(answer: &Answer) -> bool {
    binds(answer) && answer.header("oncegate-expires").is_some()
}

/// Takes new keys and sends each until its answer is final. A key that is still running is put aside for later, as a
/// job with a queue does.
async fn client(number: usize, to: Vec<SocketAddr>, over: Arc<AtomicBool>) -> Learned {
    let mut learned = Learned::new();
    let (mut aside, mut turn) = (VecDeque::new(), number);
    for count in 0.. {
        let begun =
            if over.load(Ordering::SeqCst) { None } else { Some(format!("c{number}-{count}")) };
        let Some(key) = begun.or_else(|| aside.pop_front()) else { break };
        let answers: &mut Vec<Answer> = learned.entry(key.clone()).or_default();
        // Once more after the first success: what was answered is answered again.
        while answers.len() < 2 {
            turn += 1;
            match order(&key).send(to[turn % to.len()]).await {
                Ok(answer) if answer.status.is_success() => answers.push(answer),
                Ok(answer) if answer.status == 409 && answer.problem() == "outcome-unknown" => {
                    answers.push(answer);
                    break;
                }
                Ok(answer) if answer.problem() == "in-progress" => {
                    aside.push_back(key);
                    break;
                }
                Ok(answer) => assert_eq!(answer.problem(), "store-unavailable", "{answer:?}"),
                // Nobody is there just now.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }
    learned
}

/// Whether a key may have no record: it was unknown while its replica slept or had no database, which knew that nothing had
/// been sent, and said so later.
fn freed(key: &str, answers: &[Answer], orders: &Orders) -> bool {
    let unknown = |answer: &Answer| !answer.status.is_success();
    orders.runs_of(key) == 0 && answers.iter().all(unknown)
}

/// What the API, the tables and the sink say when all is quiet.
async fn judge(orders: &Orders, place: &Place, sink: &Sink, learned: &Learned) {
    let mut statuses = BTreeMap::new();
    for row in place.rows("select key, status from idempotency_records").await {
        statuses.insert(row[0].clone().unwrap(), row[1].clone().unwrap());
    }
    let mut events: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut ids = BTreeSet::new();
    let sql = "select idempotency_key, event_type, id from outbox_events order by event_type";
    for row in place.rows(sql).await {
        let cell = |n: usize| row[n].clone().unwrap();
        events.entry(cell(0)).or_default().push(cell(1));
        ids.insert(cell(2).replace('-', "").to_lowercase());
    }
    let unknown = statuses.values().filter(|status| *status == "unknown").count();
    eprintln!("{} keys, {} executions, {unknown} unknown", learned.len(), orders.runs());
    assert!(learned.len() > KILLS, "there was work to disturb");

    for (key, answers) in learned {
        assert!(orders.runs_of(key) <= 1, "{key} was executed {} times", orders.runs_of(key));
        let Some(status) = statuses.get(key) else {
            assert!(freed(key, answers, orders), "no record of {key}: {answers:?}");
            continue;
        };
        if answers.iter().any(binds) {
            assert_eq!(status, "completed", "{key} was answered");
        }
        if let Some(first) = answers.iter().position(stored) {
            assert!(answers[first..].iter().all(stored), "{key}: {answers:?}");
        }
        if answers.iter().any(|answer| answer.status.is_success()) {
            assert_eq!(orders.runs_of(key), 1, "{key} was answered");
        }
    }
    for (key, status) in &statuses {
        assert!(learned.contains_key(key), "{key}");
        let written = events.remove(key).unwrap_or_default();
        match status.as_str() {
            "completed" => assert_eq!(written, ["audit.order", "order.created"], "{key}"),
            "unknown" => assert!(written.is_empty(), "{key}: {written:?}"),
            other => panic!("{key} is {other}"),
        }
    }
    assert!(events.is_empty(), "events without a record: {events:?}");

    let seen = sink.seen();
    assert!(seen.iter().all(|delivery| delivery.verified), "all signatures are valid");
    let delivered: BTreeSet<_> =
        seen.iter().map(|delivery| delivery.id().replace('-', "").to_lowercase()).collect();
    assert_eq!(delivered, ids, "every event, under its one id, and no other");
    let mut bodies = BTreeMap::new();
    for delivery in &seen {
        let body = bodies.entry(delivery.id()).or_insert_with(|| delivery.body.clone());
        assert_eq!(*body, delivery.body, "one id, one body");
    }
}

/// Every key once more: completed ones replay the first answer, unknown ones stay unknown.
async fn replays(orders: &Orders, place: &Place, gateway: &Gateway, learned: &Learned) {
    let runs = orders.runs();
    let ledger = orders.ledger();
    for (key, answers) in learned {
        if freed(key, answers, orders) && place.status_of(key).await.is_none() {
            continue;
        }
        let again = order(key).to(gateway.addr).await;
        let execution = ledger.iter().find(|execution| execution.key() == Some(key));
        if again.status.is_success() {
            assert!(again.replayed(), "{key}");
            let id = execution.unwrap_or_else(|| panic!("{key} was never executed")).id;
            assert_eq!(again.json()["id"], format!("order-{id}"), "{key}");
        } else {
            assert_eq!(again.problem(), "outcome-unknown", "{key}");
        }
        for answer in answers.iter().filter(|answer| binds(answer)) {
            assert_eq!((answer.status, &answer.body), (again.status, &again.body), "{key}");
            assert_eq!(answer.record(), again.record(), "{key}");
            assert_eq!(answer.header("location"), again.header("location"), "{key}");
        }
    }
    assert_eq!(orders.runs(), runs, "nothing runs twice");
}
