//! What goes wrong in a run: processes that die and sleep, wires that break and stall, a database that crashes; and the
//! operators, who clear up.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use super::history::{Answer, Clock, Sleep};
use super::plan::{Blow, Break, Step};
use crate::support::fault::Fault;
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway};

/// The gateways' processes, and what those that ended have printed.
pub(crate) struct Processes {
    pub(crate) gateways: Vec<Gateway>,
    pub(crate) logs: Vec<String>,
    pub(crate) sleeps: Vec<Sleep>,
}

/// What lies between the processes.
pub(crate) struct Wires {
    /// To the database, for each gateway; none before SQLite.
    pub(crate) stores: Vec<Fault>,
    pub(crate) api: Fault,
    pub(crate) sink: Fault,
    pub(crate) cluster: Option<Arc<Cluster>>,
}

/// What was done, and when.
#[derive(Clone)]
pub(crate) struct Notes {
    clock: Clock,
    lines: Arc<Mutex<Vec<(u64, String)>>>,
}

impl Notes {
    pub(crate) fn new(clock: Clock) -> Self {
        Self { clock, lines: Arc::default() }
    }

    pub(crate) fn note(&self, line: impl Into<String>) {
        self.lines.lock().unwrap().push((self.clock.now(), line.into()));
    }

    pub(crate) fn lines(&self) -> Vec<(u64, String)> {
        self.lines.lock().unwrap().clone()
    }
}

async fn sleep(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

impl Processes {
    /// Does the steps, but none that would begin after `end`.
    pub(crate) async fn harm(&mut self, steps: &[Step<Blow>], notes: &Notes, end: Instant) {
        for step in steps {
            sleep(step.after_ms).await;
            if Instant::now() >= end {
                return;
            }
            notes.note(format!("nemesis: {:?}", step.harm));
            match step.harm {
                Blow::Kill { gateway, down_ms } => {
                    self.gateways[gateway].kill9();
                    sleep(down_ms).await;
                    self.revive(gateway).await;
                }
                Blow::Pause { gateway, ms } => {
                    let since = notes.clock.now();
                    self.gateways[gateway].signal("STOP");
                    sleep(ms).await;
                    self.gateways[gateway].signal("CONT");
                    self.sleeps.push(Sleep { gateway, since, until: notes.clock.now() });
                }
                Blow::LogStalls { gateway, ms } => {
                    self.gateways[gateway].stall_log(true);
                    sleep(ms).await;
                    self.gateways[gateway].stall_log(false);
                }
                Blow::LogClosed { gateway } => self.gateways[gateway].close_log(),
                Blow::Restart { gateway } => {
                    self.gateways[gateway].terminate();
                    sleep(500).await;
                    self.revive(gateway).await;
                }
            }
        }
    }

    /// Kills what runs and starts it again with the same configuration, as often as it takes: the database may be away.
    pub(crate) async fn revive(&mut self, gateway: usize) {
        self.gateways[gateway].kill9();
        self.logs.push(self.gateways[gateway].log());
        let config = self.gateways[gateway].config.clone();
        self.gateways[gateway] = start(config, &mut self.logs).await;
    }
}

/// Starts a gateway, as often as it takes.
pub(crate) async fn start(config: PathBuf, logs: &mut Vec<String>) -> Gateway {
    let end = Instant::now() + process::PATIENCE;
    loop {
        let file = config.clone();
        match beside(move || Gateway::try_start(&file)).await {
            Ok(gateway) => return gateway,
            Err(output) => {
                let hopeless = output.contains(".toml:") || Instant::now() >= end;
                assert!(!hopeless, "it does not start:\n{output}");
                logs.push(output);
                sleep(100).await;
            }
        }
    }
}

/// Does what blocks, while everything else goes on.
pub(crate) async fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("it ends")
}

impl Wires {
    /// Does the steps, but none that would begin after `end`; then everything goes through again.
    pub(crate) async fn harm(&self, steps: &[Step<Break>], notes: &Notes, end: Instant) {
        for step in steps {
            sleep(step.after_ms).await;
            if Instant::now() >= end {
                break;
            }
            notes.note(format!("nemesis: {:?}", step.harm));
            self.one(step.harm).await;
        }
        for fault in self.stores.iter().chain([&self.api, &self.sink]) {
            fault.pass();
        }
    }

    async fn one(&self, harm: Break) {
        match harm {
            Break::StoreCut { gateway } => self.stores[gateway].cut(),
            Break::StoreAway { gateway, ms } => away(&self.stores[gateway], ms).await,
            Break::StoreStalls { gateway, ms } => stalls(&self.stores[gateway], ms).await,
            Break::StoreMute { gateway, statement } => {
                self.stores[gateway].swallow_the_answer_to(statement);
            }
            Break::ApiCut => self.api.cut(),
            Break::ApiAway { ms } => away(&self.api, ms).await,
            Break::ApiStalls { ms } => stalls(&self.api, ms).await,
            Break::ApiDown { ms } => {
                self.api.stop_listening().await;
                sleep(ms).await;
                self.api.listen();
            }
            Break::SinkCut => self.sink.cut(),
            Break::SinkAway { ms } => away(&self.sink, ms).await,
            Break::Crash { down_ms } => self.without_a_server(Cluster::crash, down_ms).await,
            Break::Stop { down_ms } => self.without_a_server(Cluster::stop, down_ms).await,
        }
    }

    async fn without_a_server(&self, end: fn(&Cluster), down_ms: u64) {
        let cluster = self.cluster.as_ref().expect("a server that can be ended");
        let (ending, starting) = (Arc::clone(cluster), Arc::clone(cluster));
        beside(move || end(&ending)).await;
        sleep(down_ms).await;
        beside(move || starting.start()).await;
    }
}

async fn away(fault: &Fault, ms: u64) {
    fault.refuse();
    fault.cut();
    sleep(ms).await;
    fault.pass();
}

async fn stalls(fault: &Fault, ms: u64) {
    fault.stall();
    sleep(ms).await;
    fault.pass();
}

/// The operators: now and then one of the unknown records is completed or released by hand.
pub(crate) struct Operators {
    pub(crate) random: fastrand::Rng,
    /// A configuration that leads past the faults.
    pub(crate) config: PathBuf,
    pub(crate) notes: Notes,
    /// With what they wanted to complete which record. Whether they did, the audit table says.
    pub(crate) by_hand: Vec<(String, Answer)>,
}

impl Operators {
    pub(crate) async fn work(&mut self, end: Instant) {
        loop {
            sleep(self.random.u64(300..1500)).await;
            if Instant::now() >= end {
                return;
            }
            self.act().await;
        }
    }

    async fn act(&mut self) {
        let listed = self.run(&["records", "list", "--status", "unknown", "--json"]).await;
        let Ok(listed) = serde_json::from_str::<serde_json::Value>(&listed.1) else { return };
        let ids: Vec<_> = listed["records"].as_array().into_iter().flatten().collect();
        let Some(record) = self.random.choice(&ids).and_then(|row| row["id"].as_str()) else {
            return;
        };
        let record = record.to_owned();
        if self.random.bool() {
            let (code, _, _) =
                self.run(&["records", "release", &record, "--reason", "checked"]).await;
            self.notes.note(format!("operator: release {record}: exit status {code}"));
            return;
        }
        let number = self.by_hand.len() + 1;
        let body = format!(r#"{{"id":"h-{number}"}}"#);
        let headers = vec![
            ("content-type".to_owned(), "application/json".to_owned()),
            ("x-operator".to_owned(), number.to_string()),
        ];
        let answer = Answer { status: 201, headers, body: body.clone().into_bytes() };
        self.by_hand.push((record.clone(), answer));
        let mark = format!("X-Operator: {number}");
        let (code, _, _) = self
            .run(&[
                "records",
                "complete",
                &record,
                "--status",
                "201",
                "--body",
                &body,
                "--header",
                "Content-Type: application/json",
                "--header",
                &mark,
                "--reason",
                "checked",
            ])
            .await;
        self.notes.note(format!("operator: complete {record} as {number}: exit status {code}"));
    }

    async fn run(&self, args: &[&str]) -> (i32, String, String) {
        let config = self.config.to_str().expect("a path of text").to_owned();
        let args: Vec<_> = args.iter().map(|arg| (*arg).to_owned()).collect();
        beside(move || {
            let args: Vec<_> = args.iter().map(String::as_str).collect();
            process::run(&[args.as_slice(), &["--config", &config]].concat())
        })
        .await
    }
}

/// A gateway answers on this address whatever it is; used to tell when all are back.
pub(crate) async fn serves(addr: SocketAddr) -> bool {
    tokio::net::TcpStream::connect(addr).await.is_ok()
}
