//! The commands on records and events: exact text, JSON, exit status, and what they refuse.

use std::time::Duration;

use bytes::Bytes;
use clap::Parser;
use oncegate::admin::resolve::Announced;
use oncegate::cli::events::{self, Events};
use oncegate::cli::print::{Exit, Failure, Out};
use oncegate::cli::records::{self, Records};
use oncegate::cli::sinks::{self, Sinks};
use oncegate::record::event::Event;
use oncegate::record::{Answer, KeptBody, Status};
use oncegate::store::{EventStatus, NextProbe, Pause, PauseReason, RecordRow, SinkState};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::shelf::{Health, Shelf, answer, event, record, record_id};

#[derive(Debug, Parser)]
enum Command {
    #[command(subcommand)]
    Records(Records),
    #[command(subcommand)]
    Events(Events),
    #[command(subcommand)]
    Sinks(Sinks),
}

/// The command line of the tests; `Err` with clap's exit status where it is not one.
fn parse(line: &[&str]) -> Result<Command, i32> {
    let args = std::iter::once("oncegate").chain(line.iter().copied());
    Command::try_parse_from(args).map_err(|error| error.exit_code())
}

/// One event of the answer, kept for an hour.
fn announce(row: &RecordRow, answer: &Answer) -> Announced {
    let event = Event {
        id: Uuid::from_u128(0xe1),
        key: format!("{}/order.created", row.id),
        kind: "order.created".to_owned(),
        position: 0,
        ordering_key: None,
        payload: Bytes::from(answer.status.as_str().to_owned()),
        sinks: vec!["main".to_owned()],
    };
    Announced { events: vec![event], failed: 0, retention: Duration::from_secs(3600) }
}

async fn attempt(shelf: &Shelf, line: &[&str], json: bool) -> Result<(Exit, String), Failure> {
    let (mut text, configured) = (Vec::new(), ["main", "other"].map(str::to_owned));
    let out = &mut Out { to: &mut text, json };
    let exit = match parse(line).unwrap() {
        Command::Records(command) => records::run(&command, shelf, &announce, out).await?,
        Command::Events(command) => events::run(&command, shelf, &configured, out).await?,
        Command::Sinks(command) => sinks::run(&command, shelf, &configured, out).await?,
    };
    Ok((exit, String::from_utf8(text).unwrap()))
}

async fn run(shelf: &Shelf, line: &[&str]) -> (Exit, String) {
    attempt(shelf, line, false).await.unwrap()
}

async fn run_json(shelf: &Shelf, line: &[&str]) -> (Exit, Value) {
    let (exit, text) = attempt(shelf, line, true).await.unwrap();
    (exit, serde_json::from_str(&text).unwrap())
}

const ID: [&str; 4] = [
    "00000000-0000-0000-0000-000000000000",
    "00000000-0000-0000-0000-000000000001",
    "00000000-0000-0000-0000-000000000002",
    "00000000-0000-0000-0000-000000000003",
];

/// Completed (1), unknown (2), running (3).
fn shelf() -> Shelf {
    let records = vec![
        record(1, "k-1", Status::Completed),
        record(2, "k\u{1b}[2J", Status::Unknown),
        record(3, "k-3", Status::InProgress),
    ];
    let events = vec![
        event(1, &records[0], "main", EventStatus::Sent),
        event(2, &records[0], "other", EventStatus::Dead),
        event(3, &records[0], "main", EventStatus::Pending),
    ];
    Shelf::with(records, events)
}

#[tokio::test]
async fn records_are_listed_as_a_table() {
    let shelf = shelf();
    shelf.records.lock().unwrap().get_mut(&record_id(3)).unwrap().owner_lives = false;
    let (exit, text) = run(&shelf, &["records", "list"]).await;
    assert_eq!(exit, Exit::Done);
    let wanted = "\
ID                                    STATUS                    ATTEMPT  TENANT  OPERATION      KEY         CREATED               ANSWER
00000000-0000-0000-0000-000000000003  in_progress (owner gone)  1        acme    orders.create  k-3         2031-01-01T00:00:03Z  -
00000000-0000-0000-0000-000000000002  unknown                   1        acme    orders.create  k\\u{1b}[2J  2031-01-01T00:00:02Z  -
00000000-0000-0000-0000-000000000001  completed                 1        acme    orders.create  k-1         2031-01-01T00:00:01Z  201
";
    assert_eq!(text, wanted);
    let (_, text) = run(&shelf, &["records", "list", "--limit", "1"]).await;
    assert!(text.ends_with("There are more: raise --limit, or narrow the list.\n"), "{text}");
    let (exit, text) = run(&shelf, &["records", "list", "--tenant", "nobody"]).await;
    assert_eq!((exit, text.as_str()), (Exit::Done, "No records.\n"));
    let (_, list) = run_json(&shelf, &["records", "list", "--status", "unknown"]).await;
    assert_eq!(list["more"], false);
    assert_eq!(list["records"].as_array().unwrap().len(), 1);
    assert_eq!(list["records"][0]["id"], ID[2]);
}

#[tokio::test]
async fn a_record_is_shown_with_its_whole_life() {
    let shelf = shelf();
    let (exit, text) = run(&shelf, &["records", "show", ID[1]]).await;
    assert_eq!(exit, Exit::Done);
    let hash = "ab".repeat(32);
    let wanted = format!(
        "\
Record 00000000-0000-0000-0000-000000000001
  status        completed
  attempt       1
  tenant_id     acme
  operation     orders.create
  key           k-1
  request_hash  {hash}
  caller        -
  owner         00000000-0000-0000-0000-00000000000a (gone)
  created_at    2031-01-01T00:00:01.000000Z
  completed_at  2031-01-01T00:00:02.000000Z
  expires_at    2031-01-02T00:00:02.000000Z
Answer 201
  content-type: application/json

  {{\"id\":1}}
Events
  EVENT                                 TYPE           SINK   STATUS   ATTEMPTS  AGE       CREATED               SENT                  LAST ERROR
  00000000-0000-0000-0000-00000000e001  order.created  main   sent     1         3days 4h  2031-01-01T00:00:01Z  2031-01-01T00:01:30Z  -
  00000000-0000-0000-0000-00000000e002  order.created  other  dead     1         3days 4h  2031-01-01T00:00:02Z  -                     500 from the sink
  00000000-0000-0000-0000-00000000e003  order.created  main   pending  1         3days 4h  2031-01-01T00:00:03Z  -                     -
Nothing was done by hand, nothing came too late
"
    );
    assert_eq!(text, wanted);
    let (exit, text) = run(&shelf, &["records", "show", ID[0]]).await;
    assert_eq!((exit, text), (Exit::Refused, format!("There is no record {}.\n", ID[0])));
    let (exit, refusal) = run_json(&shelf, &["records", "show", ID[0]]).await;
    assert_eq!((exit, &refusal["refused"]), (Exit::Refused, &json!("not_found")));
}

#[tokio::test]
async fn no_stored_body_acts_on_the_terminal_and_a_long_one_is_cut() {
    let shelf = shelf();
    let body = |bytes: Vec<u8>| {
        let mut records = shelf.records.lock().unwrap();
        let row = records.get_mut(&record_id(1)).unwrap();
        row.answer = Some(Answer { body: KeptBody::Whole(bytes.into()), ..answer(b"") });
    };
    body(b"a\x1b]0;x\x07\nb\r\n\xc2\x9bc".to_vec());
    let (_, text) = run(&shelf, &["records", "show", ID[1]]).await;
    assert!(text.contains("\n  a\\u{1b}]0;x\\u{7}\n  b\n  \\u{9b}c\nEvents\n"), "{text}");
    body(b"\xff".to_vec());
    let (_, text) = run(&shelf, &["records", "show", ID[1]]).await;
    assert!(text.contains("(not text: 4 characters of base64, see --json)"), "{text}");
    body("é".repeat(5000).into_bytes());
    let (_, text) = run(&shelf, &["records", "show", ID[1]]).await;
    assert_eq!(text.matches('é').count(), 4096);
    assert!(text.contains("(cut; --json shows all)"));
}

#[tokio::test]
async fn an_unknown_record_is_released_and_what_was_done_stays_to_be_read() {
    let shelf = shelf();
    let line = ["records", "release", ID[2], "--reason", "checked in the ledger"];
    let (exit, text) = run(&shelf, &line).await;
    let wanted = "\
Released record 00000000-0000-0000-0000-000000000002, which was unknown.
  tenant        acme
  operation     orders.create
  key           k\\u{1b}[2J
The next request under this key executes.
";
    assert_eq!((exit, text.as_str()), (Exit::Done, wanted));
    let (exit, text) = run(&shelf, &["records", "show", ID[2]]).await;
    assert_eq!(exit, Exit::Done);
    assert!(text.starts_with(&format!("Record {} is gone", ID[2])), "{text}");
    assert!(text.contains("record.release  checked in the ledger\n"), "{text}");
    let who = shelf.audit.lock().unwrap()[0].who.clone();
    assert!(!who.is_empty());
    let (_, life) = run_json(&shelf, &["records", "show", ID[2]]).await;
    assert_eq!(life["record"], Value::Null);
    assert_eq!(life["audit"][0]["why"], "checked in the ledger");
}

#[tokio::test]
async fn a_refusal_says_why_changes_nothing_and_has_exit_status_one() {
    let shelf = shelf();
    let (exit, text) = run(&shelf, &["records", "release", ID[3]]).await;
    assert_eq!((exit, exit.code()), (Exit::Refused, 1));
    assert!(
        text.contains("by 00000000-0000-0000-0000-00000000000a since 2031-01-01T00:00:03.000000Z"),
        "{text}"
    );
    let (_, refusal) = run_json(&shelf, &["records", "release", ID[3]]).await;
    assert_eq!(refusal["refused"], "running");
    assert_eq!(refusal["owner"], "00000000-0000-0000-0000-00000000000a");
    assert_eq!(refusal["since"], "2031-01-01T00:00:03.000000Z");

    let (exit, text) = run(&shelf, &["records", "release", ID[1]]).await;
    assert_eq!(exit, Exit::Refused);
    assert!(text.contains("--completed"), "{text}");
    let complete = ["records", "complete", ID[1], "--status", "200", "--body", ""];
    assert_eq!(run_json(&shelf, &complete).await.1["refused"], "completed");
    let complete = ["records", "complete", ID[3], "--status", "200", "--body", ""];
    assert_eq!(run_json(&shelf, &complete).await.1["refused"], "running");
    *shelf.moves.lock().unwrap() = true;
    let (exit, refusal) = run_json(&shelf, &["records", "release", ID[2]]).await;
    assert_eq!((exit, &refusal["refused"]), (Exit::Refused, &json!("moved")));

    assert_eq!(shelf.records.lock().unwrap().len(), 3);
    assert!(shelf.audit.lock().unwrap().is_empty());
    *shelf.moves.lock().unwrap() = false;
    let (exit, text) = run(&shelf, &["records", "release", ID[1], "--completed"]).await;
    assert_eq!(exit, Exit::Done);
    assert!(text.contains("In a moment no replica has its answer in memory: then"), "{text}");
    assert_eq!(shelf.records.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn a_completion_by_hand_keeps_the_answer_and_writes_the_routes_events() {
    let shelf = shelf();
    let line = [
        "records",
        "complete",
        ID[2],
        "--status",
        "201",
        "--body",
        "{\"id\":7}",
        "--header",
        "Content-Type: application/json",
        "--header",
        "X-A:  1 ",
        "--header",
        "X-A: é",
    ];
    let (exit, text) = run(&shelf, &line).await;
    let wanted = "\
Completed record 00000000-0000-0000-0000-000000000002, which was unknown.
  tenant        acme
  operation     orders.create
  key           k\\u{1b}[2J
Answer 201 is replayed from now on, for 1h.
Event 00000000-0000-0000-0000-0000000000e1 order.created to main.
";
    assert_eq!((exit, text.as_str()), (Exit::Done, wanted));
    let completions = shelf.completions.lock().unwrap();
    let done = &completions[0];
    assert_eq!(done.answer.body, KeptBody::Whole(Bytes::from_static(b"{\"id\":7}")));
    let values: Vec<_> = done.answer.headers.get_all("x-a").iter().map(|v| v.as_bytes()).collect();
    assert_eq!(values, [b"1".as_slice(), "é".as_bytes()]);
    assert_eq!(done.retention, Duration::from_secs(3600));
    assert_eq!(done.events[0].payload, "201");
}

#[tokio::test]
async fn a_completion_takes_its_body_from_a_file_byte_for_byte() {
    let shelf = shelf();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), b"\xff\x00\r\n").unwrap();
    let body = format!("@{}", file.path().display());
    let line = ["records", "complete", ID[2], "--status", "200", "--body", &body];
    let (exit, done) = run_json(&shelf, &line).await;
    assert_eq!((exit, &done["response_status"]), (Exit::Done, &json!(200)));
    assert_eq!(done["events"][0]["sinks"], json!(["main"]));
    let body = shelf.completions.lock().unwrap()[0].answer.body.clone();
    assert_eq!(body, KeptBody::Whole(Bytes::from_static(b"\xff\x00\r\n")));
}

#[tokio::test]
async fn an_answer_that_could_not_be_replayed_is_a_usage_error() {
    let shelf = shelf();
    for (status, body, header, wrong) in [
        ("199", "", "A: b", "--status 199"),
        ("600", "", "A: b", "--status 600"),
        ("204", "x", "A: b", "--body"),
        ("200", "@/no/such/file", "A: b", "--body @/no/such/file"),
        ("200", "", "nonsense", "write it as 'Name: value'"),
        ("200", "", "A b: c", "no header can have this name"),
        ("200", "", "A: b\r\nSet-Cookie: x", "control characters"),
        ("200", "", "Content-Length: 5", "the gateway sets this header itself"),
        ("200", "", "Oncegate-Record: 5", "the gateway sets this header itself"),
        ("200", "", "Idempotent-Replayed: true", "the gateway sets this header itself"),
    ] {
        let line =
            ["records", "complete", ID[2], "--status", status, "--body", body, "--header", header];
        let failure = attempt(&shelf, &line, false).await.unwrap_err();
        assert_eq!(failure.code(), 2, "{line:?}");
        assert!(failure.to_string().contains(wrong), "{failure}");
        assert!(!failure.to_string().contains(['\r', '\n']), "{failure:?}");
    }
    assert!(shelf.completions.lock().unwrap().is_empty());
}

#[tokio::test]
async fn events_are_listed_shown_and_redelivered() {
    let shelf = shelf();
    let event = |n: u128| Uuid::from_u128(0xe000 + n).to_string();
    let (_, text) = run(&shelf, &["events", "list", "--status", "dead"]).await;
    let wanted = "\
EVENT                                 TYPE           SINK   STATUS  ATTEMPTS  AGE       CREATED               SENT  LAST ERROR
00000000-0000-0000-0000-00000000e002  order.created  other  dead    1         3days 4h  2031-01-01T00:00:02Z  -     500 from the sink
";
    assert_eq!(text, wanted);
    let (_, text) = run(&shelf, &["events", "show", &event(1)]).await;
    assert!(text.contains("Message\n  {\"type\":\"order.created\"}\nTowards\n"), "{text}");
    let (_, text) = run(&shelf, &["events", "show", &event(2)]).await;
    let wanted = "\
Attempts
  SINK   ATTEMPT  AT                    STATUS  ERROR
  other  1        2031-01-01T00:00:03Z  500     500 from the sink
";
    assert!(text.ends_with(wanted), "{text}");

    let (exit, text) = run(&shelf, &["events", "redeliver", &event(1), "--all-sinks"]).await;
    assert_eq!((exit, text.as_str()), (Exit::Done, "1 event due again.\n  main: queued again\n"));
    let dead = ["events", "redeliver", "--status", "dead", "--sink", "other", "--reason", "fixed"];
    let (exit, text) = run(&shelf, &dead).await;
    assert_eq!((exit, text.as_str()), (Exit::Done, "1 dead event due again to other.\n"));
    assert_eq!(shelf.audit.lock().unwrap()[1].why.as_deref(), Some("fixed"));
    let (exit, done) = run_json(&shelf, &dead).await;
    assert_eq!((exit, &done["redelivered"]), (Exit::Done, &json!(0)));

    for (id, more, name) in [
        (event(9), None, "not_found"),
        (event(3), None, "delivering"),
        (event(3), Some("other"), "not_found"),
    ] {
        let mut line = vec!["events", "redeliver", &id];
        line.extend(more.iter().flat_map(|sink| ["--sink", sink]));
        let (exit, refusal) = run_json(&shelf, &line).await;
        assert_eq!((exit, &refusal["refused"]), (Exit::Refused, &json!(name)));
    }
}

/// One event, towards sinks where it stands like this.
fn towards(sinks: &[(&str, EventStatus)]) -> (Shelf, String) {
    let row = record(1, "k", Status::Completed);
    let events = sinks.iter().map(|(sink, status)| event(1, &row, sink, *status)).collect();
    (Shelf::with(vec![row], events), Uuid::from_u128(0xe001).to_string())
}

#[tokio::test]
async fn an_action_on_an_event_says_what_became_of_it_sink_by_sink() {
    use EventStatus::{Dead, Discarded, Pending, Sent};
    let all = [("a", Sent), ("b", Dead), ("c", Pending), ("d", Discarded)];
    let (shelf, id) = towards(&all);
    let (exit, text) = run(&shelf, &["events", "redeliver", &id]).await;
    let wanted = "\
1 event due again.
  a: left alone: delivered before (name the sink to send it again)
  b: queued again
  c: left alone: being delivered right now
  d: left alone: discarded before (name the sink to send it all the same)
";
    assert_eq!((exit, text.as_str()), (Exit::Done, wanted));
    let (shelf, _) = towards(&all);
    let (exit, done) = run_json(&shelf, &["events", "discard", &id]).await;
    let result = |sink: &str, result: &str| json!({ "sink": sink, "result": result });
    let told = json!([
        result("a", "sent"),
        result("b", "discarded"),
        result("c", "delivering"),
        result("d", "discarded_before")
    ]);
    assert_eq!((exit, &done["discarded"], &done["sinks"]), (Exit::Done, &json!(1), &told));

    // Nothing is done: why, of each of them.
    for (sinks, args, name, words) in [
        (&[("a", Sent), ("b", Sent)][..], &["redeliver"][..], "sent", "a: delivered before (name"),
        (
            &[("a", Sent), ("b", Discarded)],
            &["redeliver"],
            "left_alone",
            "b: discarded before (name",
        ),
        (&[("a", Sent), ("b", Discarded)], &["discard"], "left_alone", "; b: discarded before."),
        (&[("a", Sent), ("b", Pending)], &["redeliver"], "delivering", "b: being delivered"),
        (&[("", Discarded)], &["redeliver"], "discarded", "-: no sink wanted it (name"),
    ] {
        let (shelf, id) = towards(sinks);
        let line = [&["events"], args, &[id.as_str()]].concat();
        let (exit, refused) = run_json(&shelf, &line).await;
        assert_eq!((exit, &refused["refused"]), (Exit::Refused, &json!(name)), "{sinks:?}");
        assert!(refused["detail"].as_str().unwrap().contains(words), "{refused}");
        assert_eq!(refused["sinks"].as_array().unwrap().len(), sinks.len());
        assert!(
            shelf.events.lock().unwrap().iter().zip(sinks).all(|(row, was)| row.status == was.1)
        );
    }
}

#[tokio::test]
async fn a_sink_that_nobody_knows_is_a_usage_error_that_names_the_nearest() {
    let shelf = shelf();
    let id = Uuid::from_u128(0xe001).to_string();
    for line in [
        &["events", "redeliver", "--status", "dead", "--sink", "othre"][..],
        &["events", "discard", "--status", "dead", "--sink", "othre"],
        &["events", "discard", "--status", "dead", "--dry-run", "--sink", "othre"],
        &["events", "redeliver", &id, "--sink", "othre"],
        &["events", "list", "--sink", "othre"],
        &["sinks", "pause", "othre"],
        &["sinks", "resume", "othre"],
    ] {
        let failure = attempt(&shelf, line, false).await.unwrap_err();
        assert_eq!(failure.code(), 2, "{line:?}");
        let wanted = "othre: no such sink; did you mean `other`?";
        assert!(failure.to_string().ends_with(wanted), "{failure}");
    }
    let unlike = ["events", "discard", "--status", "dead", "--sink", "x"];
    let failure = attempt(&shelf, &unlike, false).await.unwrap_err().to_string();
    assert_eq!(failure, "--sink x: no such sink; there are main, other");
    assert!(shelf.audit.lock().unwrap().is_empty(), "nothing is done");
    // What the configuration does not have any more, the database may.
    shelf.gauges.lock().unwrap().dead.push(("left".to_owned(), 1));
    let old = ["events", "discard", "--status", "dead", "--sink", "left"];
    assert_eq!(run(&shelf, &old).await.0, Exit::Done);
}

#[tokio::test]
async fn events_are_discarded_and_counted_before() {
    let shelf = shelf();
    let event = |n: u128| Uuid::from_u128(0xe000 + n).to_string();
    let all = ["events", "discard", "--status", "dead", "--type", "order.created"];
    let dry = [all.as_slice(), &["--dry-run"]].concat();
    let (exit, text) = run(&shelf, &dry).await;
    let wanted = "Nothing is done. 1 dead event would be discarded.\n";
    assert_eq!((exit, text.as_str()), (Exit::Done, wanted));
    let (_, counted) = run_json(&shelf, &dry).await;
    assert_eq!(counted, json!({ "discarded": 1, "dry_run": true }));
    assert!(shelf.audit.lock().unwrap().is_empty(), "nothing is done");

    let (exit, text) =
        run(&shelf, &["events", "discard", &event(2), "--sink", "other", "--reason", "old"]).await;
    assert_eq!(
        (exit, text.as_str()),
        (Exit::Done, "1 event discarded for other.\n  other: discarded\n")
    );
    let noted = shelf.audit.lock().unwrap()[0].clone();
    assert_eq!((noted.action.as_str(), noted.why.as_deref()), ("event.discard", Some("old")));
    let (exit, text) = run(&shelf, &all).await;
    assert_eq!((exit, text.as_str()), (Exit::Done, "0 dead events discarded.\n"));
    for (n, name) in [(1, "sent"), (2, "discarded"), (3, "delivering"), (9, "not_found")] {
        let (exit, refusal) = run_json(&shelf, &["events", "discard", &event(n)]).await;
        assert_eq!((exit, &refusal["refused"]), (Exit::Refused, &json!(name)));
    }
}

#[tokio::test]
async fn the_list_of_sinks_says_when_each_is_probed_and_hides_no_error_behind_a_note() {
    let shelf = shelf();
    let paused = |sink: &str, reason, probe, note: Option<&str>| SinkState {
        sink: sink.into(),
        no: 1,
        since: std::time::SystemTime::UNIX_EPOCH,
        pause: Some(Pause { reason, probe, failed_probes: 0, note: note.map(str::to_owned) }),
        last_error: Some(format!("met by {sink}")),
    };
    let under_way = NextProbe::UnderWay { over_in: Duration::from_secs(35) };
    let soon = NextProbe::In(Duration::from_millis(2500));
    *shelf.sinks.lock().unwrap() = vec![
        paused("a", PauseReason::Failing, under_way, None),
        paused("b", PauseReason::Busy, soon, None),
        paused("c", PauseReason::Failing, NextProbe::In(Duration::ZERO), None),
        paused("d", PauseReason::Operator, NextProbe::Never, Some("a move")),
        paused("e", PauseReason::Failing, NextProbe::In(Duration::ZERO), None),
    ];
    shelf.gauges.lock().unwrap().dead = vec![("main".into(), 3)];
    shelf.gauges.lock().unwrap().pending =
        vec![("e".into(), 2, Duration::from_secs(60)), ("f".into(), 1, Duration::from_secs(1))];
    let list = async |json| {
        let mut text = Vec::new();
        let configured = ["main", "a", "b", "c", "d"].map(str::to_owned);
        let out = &mut Out { to: &mut text, json };
        let exit = sinks::run(&Sinks::List, &shelf, &configured, out).await.unwrap();
        assert_eq!(exit, Exit::Done);
        String::from_utf8(text).unwrap()
    };
    let since = "1970-01-01T00:00:00.000000Z";
    let wanted = format!(
        "\
SINK  STATE                             SINCE                        NEXT PROBE  PENDING  OLDEST  DEAD  NOTE    LAST ERROR
a     paused: failing                   {since}  under way   0        -       0     -       met by a
b     paused: busy                      {since}  in 3s       0        -       0     -       met by b
c     paused: failing                   {since}  now         0        -       0     -       met by c
d     paused: operator                  {since}  -           0        -       0     a move  met by d
e     not configured (paused: failing)  {since}  -           2        1m      0     -       met by e
f     not configured                    -                            -           1        1s      0     -       the sink answered 500: why?
main  open                              -                            -           0        -       3     -       the sink answered 500: why?
e is not configured: 2 events pending for it until it is, or until they are discarded.
f is not configured: 1 event pending for it until it is, or until they are discarded.
"
    );
    assert_eq!(list(false).await, wanted);
    let page: Value = serde_json::from_str(&list(true).await).unwrap();
    let probe = |n: usize| {
        let sink = &page["sinks"][n];
        (sink["next_probe_seconds"].as_u64(), sink["probing"].as_bool().unwrap())
    };
    let nobody = (None, false);
    assert_eq!([0, 1, 3, 4].map(probe), [(Some(0), true), (Some(3), false), nobody, nobody]);
}

#[test]
fn a_command_line_that_is_not_one_has_exit_status_two() {
    for line in [
        vec!["records", "show"],
        vec!["records", "show", "7"],
        vec!["records", "list", "--status", "done"],
        vec!["records", "list", "--since", "yesterday"],
        vec!["records", "list", "--limit", "0"],
        vec!["records", "list", "--nonsense"],
        vec!["records", "complete", ID[1], "--status", "200"],
        vec!["events", "redeliver"],
        vec!["events", "redeliver", ID[1], "--status", "dead"],
        vec!["events", "redeliver", ID[1], "--all-sinks", "--sink", "main"],
        vec!["events", "redeliver", "--status", "dead", "--all-sinks"],
        vec!["events", "discard", ID[1], "--all-sinks"],
        vec!["events", "redeliver", "--status", "sent"],
        vec!["events", "discard"],
        vec!["events", "discard", ID[1], "--dry-run"],
        vec!["events", "discard", ID[1], "--type", "order.created"],
    ] {
        assert_eq!(parse(&line).err(), Some(2), "{line:?}");
    }
    let ok = parse(&["records", "list", "--since", "1h 30m", "--status", "in_progress"]);
    let Ok(Command::Records(Records::List(args))) = ok else { panic!("{ok:?}") };
    assert_eq!(args.since, Some(Duration::from_secs(5400)));
}

#[tokio::test]
async fn a_store_that_is_away_is_a_failure_and_not_an_empty_list() {
    let shelf = shelf();
    shelf.be(Health::Down);
    for line in [vec!["records", "list"], vec!["events", "list"], vec!["records", "release", ID[2]]]
    {
        let failure = attempt(&shelf, &line, false).await.unwrap_err();
        assert_eq!(failure.code(), 1);
        assert_eq!(failure.to_string(), "the database is not available");
    }
}
