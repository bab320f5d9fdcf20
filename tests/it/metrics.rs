//! The page of metrics: in both of its formats as the official parser reads them, and what it says of process and deliveries.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use http::StatusCode;
use oncegate::clock;
use serde_json::Value;

use crate::support::client::{Answer, get, post};
use crate::support::fleet::{self, ONE_EVENT, order};
use crate::support::process::{self, eventually};
use crate::support::python;
use crate::support::rig::{self, Rig, Which, on_both_stores};
use crate::support::sink::{Act, OK, Sink};

on_both_stores! {
    both_formats_say_the_same_to_the_official_parser,
    each_delivery_is_timed_however_it_ends,
    each_request_is_timed_by_operation_and_reply,
}

/// What Prometheus 3 sends by default.
const PROMETHEUS: &str = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
    application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,\
    text/plain;version=0.0.4;q=0.3,*/*;q=0.2";

async fn page(admin: SocketAddr) -> String {
    text(&get("/metrics").to(admin).await)
}

fn text(answer: &Answer) -> String {
    assert_eq!(answer.status, StatusCode::OK);
    String::from_utf8(answer.body.to_vec()).unwrap()
}

/// The value of a series, named as it stands on the page.
fn value(page: &str, series: &str) -> Option<f64> {
    let line = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.map(|value| value.parse().unwrap())
}

/// The families of pages, as the official parser reads them.
fn parsed(pages: &[(&str, &str)]) -> Vec<BTreeMap<String, Value>> {
    let folder = tempfile::tempdir().unwrap();
    let mut script = python::script("metrics.py");
    for (format, page) in pages {
        let file = folder.path().join(format);
        std::fs::write(&file, page).unwrap();
        script.arg(format).arg(file);
    }
    let ran = script.output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let lines = String::from_utf8(ran.stdout).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A family as either format shows it: its type, its help, and its series. Bounds of buckets are written in two ways, and one
/// of the formats has no type for what never changes.
fn alike((name, family): (&String, &Value)) -> (String, (String, Value, BTreeMap<String, Value>)) {
    let kind = family["type"].as_str().unwrap();
    let (name, kind) = match kind {
        "info" => (format!("{name}_info"), "gauge"),
        _ => (name.clone(), kind),
    };
    let series = family["samples"].as_object().unwrap().iter();
    let series = series.map(|(key, value)| (key.replace(".0\"]", "\"]"), value.clone())).collect();
    (name, (kind.to_owned(), family["help"].clone(), series))
}

async fn both_formats_say_the_same_to_the_official_parser(which: Which) {
    let sink = Sink::start(|_, _| OK).await;
    let rig = Rig::start(which, &format!("{ONE_EVENT}{}", fleet::sink(sink.port))).await;
    for _ in 0..2 {
        assert_eq!(order("k").to(rig.gateway.addr).await.status, StatusCode::CREATED);
    }
    let admin = rig.gateway.admin;
    let sent = r#"oncegate_deliveries_total{sink="main",result="sent"}"#;
    eventually("the delivery is counted", async || value(&page(admin).await, sent) == Some(1.0))
        .await;

    let plain = get("/metrics").to(admin).await;
    assert_eq!(plain.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let open = get("/metrics").header("accept", PROMETHEUS).to(admin).await;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert_eq!(open.header("content-type"), Some(kind));
    assert!([&plain, &open].iter().all(|page| page.header("vary") == Some("accept")));
    let (plain, open) = (text(&plain), text(&open));
    assert!(open.ends_with("# EOF\n") && !plain.contains("# EOF"), "{plain}");

    let [mut plain, mut open] = [("text", plain), ("openmetrics", open)]
        .map(|(format, page)| parsed(&[(format, &page)]).remove(0))
        .map(|families| families.iter().map(alike).collect::<BTreeMap<_, _>>());
    assert!(plain.len() > 20, "{plain:?}");
    // The process goes on between the two.
    for families in [&mut plain, &mut open] {
        for (_, (kind, _, series)) in
            families.iter_mut().filter(|(_, (kind, ..))| kind != "histogram")
        {
            series.values_mut().filter(|_| kind == "gauge").for_each(|value| *value = Value::Null);
        }
        let cpu = families.get_mut("process_cpu_seconds").unwrap();
        cpu.2.values_mut().for_each(|value| *value = Value::Null);
    }
    assert_eq!(plain, open);
    let step = &plain["oncegate_step_seconds"];
    assert_eq!((step.0.as_str(), step.2.len()), ("histogram", 4 * 18), "{step:?}");
}

async fn each_delivery_is_timed_however_it_ends(which: Which) {
    // The first one fails after a while, the second is taken at once.
    let late = Duration::from_millis(300);
    let script = move |_: &_, before| {
        if before == 0 { Act::After(late, Box::new(Act::Answer(500, ""))) } else { OK }
    };
    let sink = Sink::start(script).await;
    let rig = Rig::start(which, &format!("{ONE_EVENT}{}", fleet::sink(sink.port))).await;
    assert_eq!(order("k").to(rig.gateway.addr).await.status, StatusCode::CREATED);
    let counted = r#"oncegate_delivery_duration_seconds_count{sink="main"}"#;
    let admin = rig.gateway.admin;
    eventually("both are timed", async || value(&page(admin).await, counted) == Some(2.0)).await;
    let page = page(admin).await;
    let bucket = |bound: &str| {
        let name = "oncegate_delivery_duration_seconds_bucket";
        value(&page, &format!("{name}{{sink=\"main\",le=\"{bound}\"}}")).unwrap()
    };
    assert!(bucket("0.25") <= 1.0, "the first took longer: {page}");
    assert_eq!((bucket("30"), bucket("+Inf")), (2.0, 2.0));
    let sum = value(&page, r#"oncegate_delivery_duration_seconds_sum{sink="main"}"#).unwrap();
    assert!(sum >= 0.3, "{sum}");
}

/// The values of a family of this operation by reply, as far as they are not 0.
fn by_reply(page: &str, name: &str) -> BTreeMap<String, f64> {
    let start = format!("{name}{{operation=\"orders.create\",reply=\"");
    let series = page.lines().filter_map(|line| line.strip_prefix(&start)?.split_once("\"} "));
    let values = series.map(|(reply, value)| (reply.to_owned(), value.parse().unwrap()));
    values.filter(|(_, value)| *value != 0.0).collect()
}

async fn each_request_is_timed_by_operation_and_reply(which: Which) {
    let rig = Rig::with(which, "", "require_key = false", "").await;
    let (to, admin) = (rig.gateway.addr, rig.gateway.admin);
    for _ in 0..3 {
        assert_eq!(order("k").to(to).await.status, StatusCode::CREATED);
    }
    assert_eq!(order("k").body("{}").to(to).await.problem(), "request-mismatch");
    assert_eq!(order("").to(to).await.problem(), "key-invalid");
    post("/orders", "{}").tenant("acme").to(to).await;
    let nobody = format!("http://127.0.0.1:{}", process::free_port());
    let (_place, before_nobody) = rig::gateway(which, &nobody, "", "").await;
    assert_eq!(order("k").to(before_nobody.addr).await.problem(), "upstream-unreachable");

    let shown = page(admin).await;
    let counted = by_reply(&shown, "oncegate_requests_total");
    let wanted = [
        ("executed", 1.0),
        ("invalid", 1.0),
        ("mismatch", 1.0),
        ("passed", 1.0),
        ("replayed", 2.0),
    ];
    assert_eq!(counted, wanted.map(|(reply, count)| (reply.to_owned(), count)).into());
    assert_eq!(by_reply(&shown, "oncegate_request_duration_seconds_count"), counted);
    let took = by_reply(&shown, "oncegate_request_duration_seconds_sum")["executed"];
    let forward = value(&shown, "oncegate_step_seconds_sum{step=\"forward\"}").unwrap();
    assert!(took >= forward && forward > 0.0, "a request takes as long as its steps: {shown}");

    let released = page(before_nobody.admin).await;
    let counted = by_reply(&released, "oncegate_requests_total");
    assert_eq!(counted, [("released".to_owned(), 1.0)].into());
    assert_eq!(by_reply(&released, "oncegate_request_duration_seconds_count"), counted);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_says_which_program_it_is_and_what_linux_says_of_it() {
    let seconds = || clock::since_1970().as_secs_f64();
    let before = seconds();
    let rig = Rig::start(Which::Sqlite, "").await;
    let after = seconds();
    let page = page(rig.gateway.admin).await;
    let build = page.lines().find(|line| line.starts_with("oncegate_build_info{")).unwrap();
    assert!(build.contains(concat!("version=\"", env!("CARGO_PKG_VERSION"), "\"")), "{build}");
    assert!(build.contains("revision=\""), "{build}");

    let process = |name: &str| value(&page, &format!("process_{name}")).expect(name);
    // Linux knows the second in which the machine began, no more.
    let started = process("start_time_seconds");
    assert!((before - 2.0..=after + 2.0).contains(&started), "{before} {started} {after}");
    let files = |name: &str| {
        std::fs::read_to_string(format!("/proc/{}/{name}", rig.gateway.pid())).unwrap()
    };
    let limits = files("limits");
    let open = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let soft: f64 = open.split_whitespace().next().unwrap().parse().unwrap();
    assert_eq!(process("max_fds"), soft);
    let fds = std::fs::read_dir(format!("/proc/{}/fd", rig.gateway.pid())).unwrap().count();
    // The connection that asked is closed by now, or not yet.
    assert!((process("open_fds") - fds as f64).abs() <= 2.0, "{fds} {page}");
    let status = files("status");
    let said = |name: &str| -> f64 {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    assert!((process("threads") - said("Threads:")).abs() <= 2.0);
    // It goes on, and may start a thread: its memory grows by a thread's, not by the factor of another unit.
    let near = |bytes: f64, kib: f64| (0.5..2.0).contains(&(bytes / 1024.0 / kib));
    assert!(near(process("resident_memory_bytes"), said("VmRSS:")), "{page}");
    assert!(near(process("virtual_memory_bytes"), said("VmSize:")), "{page}");
    let cpu = process("cpu_seconds_total");
    assert!((0.0..=(seconds() - before) * 64.0).contains(&cpu), "{cpu}");
}
