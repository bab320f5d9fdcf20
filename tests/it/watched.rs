//! No background task dies in silence: what can be begun anew is, and where one cannot the process ends after its drain, with a
//! status of its own.

use std::time::Duration;

use http::StatusCode;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::client::get;
use crate::support::fleet::{TWO_EVENTS, order, sending, sink};
use crate::support::orders::Orders;
use crate::support::postgres::{as_somebody, server_user};
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Which, on_both_stores};
use crate::support::sink::{OK, Sink};

on_both_stores! {
    while_a_loop_is_not_running_the_process_is_not_ready,
    a_loop_that_panics_is_told_of_and_begun_anew,
    a_process_whose_store_worker_is_lost_ends_with_a_status_of_its_own_and_loses_nothing,
}

struct World {
    orders: Orders,
    place: Place,
    sink: Sink,
    gateway: Gateway,
}

async fn world(which: Which, fault: &str) -> World {
    let (orders, place) = (Orders::start().await, Place::new(which).await);
    let sunk = Sink::start(|_, _| OK).await;
    let store = "lease = \"3s\"\nsweep_every = \"100ms\"";
    let more = format!("{TWO_EVENTS}{}", sink(sunk.port));
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", store, "", &more);
    let config = process::config(place.folder.path(), &toml);
    let gateway = tokio::task::block_in_place(|| Gateway::with_fault(&config, fault));
    World { orders, place, sink: sunk, gateway }
}

/// The task of this name, as the admin listener shows it.
async fn task(gateway: &Gateway, name: &str) -> Value {
    let page = get("/api/v1/tasks").to(gateway.admin).await.json();
    let tasks = page["tasks"].as_array().expect("tasks");
    let found = tasks.iter().find(|task| task["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {page}")).clone()
}

async fn ends(gateway: &Gateway, name: &str) -> u64 {
    let text = get("/metrics").to(gateway.admin).await.body;
    let text = String::from_utf8_lossy(&text).into_owned();
    let line = format!("oncegate_task_ends_total{{task=\"{name}\"}} ");
    text.lines().find_map(|text| text.strip_prefix(&line)).map_or(0, |n| n.parse().unwrap())
}

async fn a_loop_that_panics_is_told_of_and_begun_anew(which: Which) {
    let loops = [
        ("lease", "before-heartbeat@2=panic"),
        ("sweeper", "before-sweep-records=panic"),
        ("sink", "before-claim=panic"),
    ];
    for (name, fault) in loops {
        let world = world(which, fault).await;
        let gateway = &world.gateway;
        eventually("it is counted", async || ends(gateway, name).await == 1).await;
        let again = async || {
            let task = task(gateway, name).await;
            task["state"] == "running" && task["runs"].as_u64() > Some(0)
        };
        eventually("it runs again", again).await;
        assert_eq!(task(gateway, name).await["ends"], 1, "{name}");
        let said = async || {
            let log = gateway.log();
            log.contains("panicked at src/") && log.contains("is started again")
        };
        eventually("the log says so", said).await;
        assert_eq!(order("k").to(gateway.addr).await.status, StatusCode::CREATED, "{name}");
        eventually("events go out", async || world.sink.ids().len() == 2).await;
        let ready = get("/readyz").to(gateway.admin).await;
        assert_eq!(ready.status, StatusCode::OK, "{name}: {ready:?}");
    }
}

/// It panics five times in a row: the pauses grow to a second and a half.
async fn while_a_loop_is_not_running_the_process_is_not_ready(which: Which) {
    let panics = (1..=5).map(|n| format!("before-sweep-records@{n}=panic")).collect::<Vec<_>>();
    let world = world(which, &panics.join(",")).await;
    let gateway = &world.gateway;
    eventually("readiness names it", async || {
        let ready = get("/readyz").to(gateway.admin).await;
        ready.status == StatusCode::SERVICE_UNAVAILABLE && ready.json()["not_running"] == "sweeper"
    })
    .await;
    assert_eq!(order("k").to(gateway.addr).await.status, StatusCode::CREATED, "it serves");
    let again = async || get("/readyz").to(gateway.admin).await.status == StatusCode::OK;
    eventually("it is ready again", async || ends(gateway, "sweeper").await == 5 && again().await)
        .await;
}

/// The worker dies in the middle of an outcome: its caller has the answer, the spill has the outcome, and the next process
/// writes it.
async fn a_process_whose_store_worker_is_lost_ends_with_a_status_of_its_own_and_loses_nothing(
    which: Which,
) {
    let World { orders, place, sink, mut gateway } = world(which, "batch-begun@2=panic").await;
    let (to, admin) = (gateway.addr, gateway.admin);
    orders.hold();
    let first = sending(order("k"), to);
    orders.asked(1).await;
    orders.go();
    let first = first.await.unwrap();
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    assert_eq!(first.header("oncegate-stored"), None, "it is in the spill: {first:?}");
    let status = tokio::task::block_in_place(|| gateway.exited());
    assert_eq!(status.code(), Some(70), "{status:?}\n{}", gateway.log());
    let log = gateway.log();
    assert!(log.contains("task=\"completions\""), "{log}");
    assert!(get("/readyz").send(admin).await.is_err());

    let gateway = tokio::task::block_in_place(|| gateway.restart());
    let retry = order("k").to(gateway.addr).await;
    assert!(retry.replayed(), "{retry:?}");
    assert_eq!((retry.body, orders.runs()), (first.body, 1));
    eventually("its events go out", async || sink.ids().len() == 2).await;
    assert_eq!(place.records().await, 1);
}

/// As the user whose process it is: not every root may set limits of others.
fn allow_no_more_threads(pid: u32) {
    let set =
        "import resource, sys; resource.prlimit(int(sys.argv[1]), resource.RLIMIT_NPROC, (1, 1))";
    let status = as_somebody("python3").args(["-c", set, &pid.to_string()]).status();
    assert!(status.expect("python3 starts").success());
}

/// A cgroup's limit of processes, say. A name is resolved on a thread, and the runtime panics where it has none for that.
#[tokio::test(flavor = "multi_thread")]
async fn where_the_system_gives_no_more_threads_names_are_resolved_all_the_same() {
    let orders = Orders::start().await;
    let folder = TempDir::new().unwrap();
    if let Some((uid, gid)) = server_user() {
        std::os::unix::fs::chown(folder.path(), Some(uid), Some(gid)).unwrap();
    }
    let place = Place::new(Which::Sqlite).await;
    let file = folder.path().join("oncegate.db");
    let api = orders.url().replace("127.0.0.1", "localhost");
    let toml = rig::config(&place, &api, "");
    let toml = toml.replace(&place.url, &format!("sqlite:{}", file.display()));
    let path = process::config(folder.path(), &toml);
    // Where the user may read it: what was built may be under the home of root. Root itself is under no such limit.
    let program = folder.path().join("oncegate");
    std::fs::copy(env!("CARGO_BIN_EXE_oncegate"), &program).unwrap();
    let mut command = as_somebody(&program);
    command.args(["serve", "--config"]).arg(&path).current_dir(folder.path());
    let gateway = Gateway::launch(command, &path).unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(order("before").to(gateway.addr).await.status, 201);
    // What is tested: nothing was resolved for longer than an idle thread is usually kept.
    tokio::time::sleep(Duration::from_secs(11)).await;
    allow_no_more_threads(gateway.pid());
    for n in 0..4 {
        assert_eq!(order(&format!("k-{n}")).to(gateway.addr).await.status, 201);
    }
    assert_eq!(orders.runs(), 5);
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
}
