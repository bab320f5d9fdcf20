//! A log that cannot be written costs lines, and nothing else: no outcome, no answer, no background work, no clean end.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use http::StatusCode;
use rustix::process::Resource;

use crate::support::client::get;
use crate::support::fault::Fault;
use crate::support::fleet::{TWO_EVENTS, order, sending, sink};
use crate::support::orders::Orders;
use crate::support::postgres::Cluster;
use crate::support::process::{self, Gateway, PATIENCE, eventually};
use crate::support::rig::{self, Place, Rig, Which, on_both_stores};
use crate::support::signals;
use crate::support::sink::{Act, OK, Sink};
use crate::support::upstream::{Reply, Upstream};

/// Where the log's file ends that may not grow: everything else that is written is shorter.
const ENDS_AT: usize = 4 << 20;

/// What is wrong with standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    /// Its reader has died.
    Gone,
    /// The disk is full.
    Full,
    /// It is a file that may not grow any more.
    Ends,
    /// Its reader stalls, and it blocks.
    Stalled,
    /// Its reader stalls, and it does not block.
    NonBlocking,
}

/// A standard error, and what the test keeps of it.
struct Stderr {
    given: Stdio,
    /// The reader that stalls.
    _reader: Option<UnixStream>,
}

impl Stderr {
    fn of(broken: Broken, folder: &Path) -> Self {
        match broken {
            Broken::Gone => {
                let path = fifo(folder);
                // Opened for both, so that opening it waits for nobody; closed before the gateway begins.
                let both = File::options().read(true).write(true).open(&path).unwrap();
                let given = File::options().write(true).open(&path).unwrap().into();
                drop(both);
                Self { given, _reader: None }
            }
            Broken::Full => {
                let full = File::options().write(true).open("/dev/full").unwrap();
                Self { given: full.into(), _reader: None }
            }
            Broken::Ends => {
                let file = folder.join("log");
                std::fs::write(&file, vec![b'x'; ENDS_AT]).unwrap();
                let file = File::options().append(true).open(file).unwrap();
                Self { given: file.into(), _reader: None }
            }
            Broken::Stalled | Broken::NonBlocking => {
                let (given, reader) = stalled();
                given.set_nonblocking(broken == Broken::NonBlocking).unwrap();
                Self { given: OwnedFd::from(given).into(), _reader: Some(reader) }
            }
        }
    }
}

/// A pipe with a name, so that its reader can come back.
fn fifo(folder: &Path) -> PathBuf {
    let path = folder.join("log");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    path
}

/// A stream that takes not one byte more until its reader reads.
fn stalled() -> (UnixStream, UnixStream) {
    let (mut given, reader) = UnixStream::pair().unwrap();
    given.set_nonblocking(true).unwrap();
    while given.write(&[b'x'; 4096]).is_ok() {}
    while given.write(b"x").is_ok() {}
    given.set_nonblocking(false).unwrap();
    (given, reader)
}

/// A sink that takes nothing until it is well.
async fn moody_sink() -> (Sink, Arc<AtomicBool>) {
    let well = Arc::new(AtomicBool::new(true));
    let asked = Arc::clone(&well);
    let script =
        move |_: &_, _| if asked.load(Ordering::SeqCst) { OK } else { Act::Answer(500, "") };
    (Sink::start(script).await, well)
}

async fn ready(gateway: &Gateway) -> StatusCode {
    get("/readyz").to(gateway.admin).await.status
}

async fn lost(gateway: &Gateway, reason: &str) -> u64 {
    let text = get("/metrics").to(gateway.admin).await.body;
    let text = String::from_utf8_lossy(&text).into_owned();
    let name = format!("oncegate_log_lines_lost_total{{reason=\"{reason}\"}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&name));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

/// Five requests are with the API when database and sink go away: each gets its answer, each outcome is kept, each event is
/// delivered, and the process ends as it was told.
async fn nothing_is_lost_but_lines(broken: Broken) {
    let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
    let (sunk, well) = moody_sink().await;
    let (fault, url) = Fault::before_postgres(&place.url, Cluster::shared().port()).await;
    let store = "lease = \"3s\"\nsweep_every = \"500ms\"";
    let more = format!("{TWO_EVENTS}{}", sink(sunk.port));
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", store, "", &more);
    let config = process::config(place.folder.path(), &toml.replace(&place.url, &url));
    let stderr = Stderr::of(broken, place.folder.path());
    let mut gateway =
        tokio::task::block_in_place(|| Gateway::logging_to(stderr.given, &config, ""));
    if broken == Broken::Ends {
        signals::limit(gateway.pid(), Resource::Fsize, Some(ENDS_AT as u64));
    }
    let to = gateway.addr;

    orders.hold();
    let five: Vec<_> = (0..5).map(|n| sending(order(&format!("k-{n}")), to)).collect();
    orders.asked(5).await;
    well.store(false, Ordering::SeqCst);
    fault.refuse();
    fault.cut();
    orders.go();
    for one in five {
        let answer = one.await.unwrap();
        assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
        assert_eq!(answer.header("oncegate-stored"), None, "it is in the spill");
    }
    assert_eq!(order("new").to(to).await.problem(), "store-unavailable", "nothing was sent");
    assert_eq!(get("/orders").to(to).await.status, StatusCode::CREATED, "it passes through");
    let told = eventually("readiness tells", async || ready(&gateway).await != StatusCode::OK);
    told.await;

    fault.pass();
    for n in 0..5 {
        let replayed = async || order(&format!("k-{n}")).to(to).await.replayed();
        eventually("each outcome is kept", replayed).await;
    }
    well.store(true, Ordering::SeqCst);
    eventually("each event is delivered", async || sunk.ids().len() == 10).await;
    eventually("it serves", async || order("new").to(to).await.status == StatusCode::CREATED).await;
    eventually("readiness tells", async || ready(&gateway).await == StatusCode::OK).await;
    assert_eq!((orders.runs_of("new"), orders.runs()), (1, 7));
    match broken {
        Broken::Gone | Broken::Full | Broken::Ends => {
            assert!(lost(&gateway, "write_failed").await > 0)
        }
        Broken::Stalled | Broken::NonBlocking => {}
    }
    gateway.terminate();
    let status = tokio::task::block_in_place(|| gateway.exited());
    assert_eq!(status.code(), Some(0), "{status:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_whose_reader_died_costs_no_outcome() {
    nothing_is_lost_but_lines(Broken::Gone).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_on_a_full_disk_costs_no_outcome() {
    nothing_is_lost_but_lines(Broken::Full).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_whose_file_may_not_grow_costs_no_outcome() {
    nothing_is_lost_but_lines(Broken::Ends).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_nobody_reads_costs_no_outcome() {
    nothing_is_lost_but_lines(Broken::Stalled).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_does_not_block_and_nobody_reads_costs_no_outcome() {
    nothing_is_lost_but_lines(Broken::NonBlocking).await;
}

on_both_stores! {
    a_log_that_can_be_written_again_says_what_was_lost,
    a_process_ends_though_nobody_reads_its_output,
}

async fn a_log_that_can_be_written_again_says_what_was_lost(which: Which) {
    let place = Place::new(which).await;
    // What it answers is no answer, which is a line of the log.
    let upstream = Upstream::always(Reply::fin("")).await;
    let toml = rig::config(&place, &format!("http://{}", upstream.addr), "");
    let config = process::config(place.folder.path(), &toml);
    let stderr = Stderr::of(Broken::Gone, place.folder.path());
    let gateway = tokio::task::block_in_place(|| Gateway::logging_to(stderr.given, &config, ""));
    assert_eq!(order("k").to(gateway.addr).await.problem(), "upstream-failed");
    eventually("its line is lost", async || lost(&gateway, "write_failed").await > 0).await;

    let path = place.folder.path().join("log");
    let lines = File::options().read(true).write(true).open(path).unwrap();
    let (line, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for read in BufReader::new(lines).lines().map_while(Result::ok) {
            if line.send(read).is_err() {
                return;
            }
        }
    });
    assert_eq!(order("l").to(gateway.addr).await.problem(), "upstream-failed");
    let end = Instant::now() + PATIENCE;
    let said = std::iter::from_fn(|| {
        told.recv_timeout(end.saturating_duration_since(Instant::now())).ok()
    });
    let said = said.into_iter().find(|line| line.contains("log lines were lost"));
    assert!(said.expect("it says so").contains("lines="));
}

/// Whoever started it does not read its standard output: it serves, and ends when it is told to.
async fn a_process_ends_though_nobody_reads_its_output(which: Which) {
    let (orders, place) = (Orders::start().await, Place::new(which).await);
    let (listen, admin) = (process::free_port(), process::free_port());
    let toml = rig::config(&place, &orders.url(), "");
    let toml = toml.replacen("127.0.0.1:0", &format!("127.0.0.1:{listen}"), 1);
    let toml = toml.replacen("127.0.0.1:0", &format!("127.0.0.1:{admin}"), 1);
    let config = process::config(place.folder.path(), &toml);
    let (out, _unread) = stalled();
    let (errors, _unread_too) = stalled();
    let mut child = process::serve(&config)
        .current_dir(place.folder.path())
        .stdin(Stdio::null())
        .stdout(OwnedFd::from(out))
        .stderr(OwnedFd::from(errors))
        .spawn()
        .unwrap();
    let to = ([127, 0, 0, 1], listen).into();
    let served =
        async || order("k").send(to).await.is_ok_and(|answer| answer.status == StatusCode::CREATED);
    eventually("it serves", served).await;
    process::signal(child.id(), "TERM");
    let status = tokio::task::block_in_place(|| process::ended(&mut child));
    assert_eq!(status.and_then(|status| status.code()), Some(0), "{status:?}");
}

#[test]
fn a_command_ends_though_nobody_reads_its_errors() {
    let folder = tempfile::TempDir::new().unwrap();
    let config = process::config(folder.path(), "nonsense = 1\n");
    for args in [["serve", "--config"], ["check", "--config"], ["migrate", "--config"]] {
        let (errors, _unread) = stalled();
        let mut child = Command::new(env!("CARGO_BIN_EXE_oncegate"))
            .args(args)
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(OwnedFd::from(errors))
            .spawn()
            .unwrap();
        let status = process::ended(&mut child);
        assert_eq!(status.and_then(|status| status.code()), Some(2), "{args:?}: {status:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_whose_output_cannot_be_written_has_done_what_it_says_and_tells() {
    let rig = Rig::start(Which::Sqlite, "").await;
    rig.orders.answer_status(502);
    let record = order("k").to(rig.gateway.addr).await.record();
    let run = |args: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_oncegate"))
            .args(args)
            .arg("--config")
            .arg(&rig.gateway.config)
            .stdout(File::options().write(true).open("/dev/full").unwrap())
            .output()
            .unwrap()
    };
    for args in [&["records", "release", record.as_str()][..], &["sinks", "list"]] {
        let ended = run(args);
        let errors = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(1), "{args:?}: {errors}");
        assert!(errors.contains("oncegate: cannot write the output"), "{errors}");
    }
    assert_eq!(rig.place.status_of("k").await, None, "it is released");
}

/// A panic is a line like any other, counted, and costs only the task that it happens in.
#[tokio::test(flavor = "multi_thread")]
async fn a_panic_is_logged_and_counted_also_where_nobody_reads() {
    for broken in [None, Some(Broken::Gone), Some(Broken::Full), Some(Broken::Stalled)] {
        let (orders, place) = (Orders::start().await, Place::new(Which::Sqlite).await);
        let config = process::config(place.folder.path(), &rig::config(&place, &orders.url(), ""));
        let fault = "answer-body=panic";
        let (gateway, _stderr) = match broken {
            None => (Gateway::with_fault(&config, fault), None),
            Some(broken) => {
                let Stderr { given, _reader: reader } = Stderr::of(broken, place.folder.path());
                (Gateway::logging_to(given, &config, fault), reader)
            }
        };
        let first = order("k").to(gateway.addr).await;
        assert_eq!(first.problem(), "upstream-failed", "{broken:?}");
        let text = get("/metrics").to(gateway.admin).await.body;
        let text = String::from_utf8_lossy(&text).into_owned();
        assert!(text.contains("oncegate_panics_total 1\n"), "{broken:?}: {text}");
        let second = order("l").to(gateway.addr).await;
        assert_eq!(second.status, StatusCode::CREATED, "{broken:?}");
        if broken.is_none() {
            let said = async || gateway.log().contains("panicked at src/");
            eventually("it says where", said).await;
        }
    }
}

/// The reason is what is read first: it stands behind all that the start has logged, and names the setting.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_line_says_why_a_process_did_not_start() {
    let place = Place::new(Which::Sqlite).await;
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let toml = rig::config(&place, "http://127.0.0.1:9", "");
    let on_taken = toml.replacen("listen = \"127.0.0.1:0\"", &format!("listen = \"{address}\""), 1);
    let line = 1 + on_taken.lines().position(|line| line.contains(&address.to_string())).unwrap();
    let by_line = format!("server.listen, line {line} of the configuration");
    let by_variable = "admin.listen, by ONCEGATE_ADMIN_LISTEN".to_owned();
    for (toml, variable, setting) in
        [(&on_taken, None, by_line), (&toml, Some(address), by_variable)]
    {
        let mut command = process::serve(&process::config(place.folder.path(), toml));
        if let Some(address) = variable {
            command.env("ONCEGATE_ADMIN_LISTEN", address.to_string());
        }
        let output = command.output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{errors}");
        let told = format!("oncegate: cannot listen on {address} ({setting}): ");
        let last = errors.lines().last().unwrap();
        assert!(last.starts_with(&told), "{told}\n{errors}");
        assert!(
            errors.lines().count() > 1 && errors.contains("WARN"),
            "behind the warnings: {errors}"
        );
    }
}

/// Also of a start that fails after it has listened, and is taken down again.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_line_says_why_a_process_that_listened_has_ended() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
    let (fault, url) = Fault::before_postgres(&place.url, Cluster::shared().port()).await;
    fault.refuse();
    let store = "wait_at_start = \"2s\"";
    let toml = rig::config_at(&place, &orders.url(), "127.0.0.1:0", store, "", TWO_EVENTS);
    let config = process::config(place.folder.path(), &toml.replace(&place.url, &url));
    let mut command = process::serve(&config);
    command.current_dir(place.folder.path());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("listening without the store"), "{errors}");
    let last = errors.lines().last().unwrap();
    assert!(last.starts_with("oncegate: the store could not be opened within"), "{errors}");
}
