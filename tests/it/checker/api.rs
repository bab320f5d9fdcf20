//! The API of a run: writes down each execution, and answers as the seed says.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::history::{Answer, Clock, Execution, Scope};
use super::plan::{self, Ends, Mood, Operation, Said};
use crate::support::raw::header;
use crate::support::upstream::{Reply, Seen, Upstream};

pub(crate) struct Api {
    pub(crate) upstream: Upstream,
    ledger: Arc<Mutex<Vec<Execution>>>,
    calm: Arc<AtomicBool>,
}

impl Api {
    pub(crate) async fn start(seed: u64, clock: Clock) -> Self {
        let ledger = Arc::new(Mutex::new(Vec::new()));
        let calm = Arc::new(AtomicBool::new(false));
        let (ours, is_calm) = (Arc::clone(&ledger), Arc::clone(&calm));
        let turns = Mutex::new(HashMap::<Scope, usize>::new());
        let upstream = Upstream::start(move |_, seen| {
            let mut run = read(seen);
            run.at = clock.now();
            let nth = {
                let mut turns = turns.lock().unwrap();
                let turn = turns.entry(run.scope.clone()).or_default();
                *turn += 1;
                *turn - 1
            };
            let mood = if is_calm.load(Ordering::SeqCst) {
                Mood { delay_ms: 0, answer: Said::Created, ends: Ends::Whole }
            } else {
                plan::mood(seed, &run.scope, nth)
            };
            let mut ledger = ours.lock().unwrap();
            run.number = ledger.len() as u64 + 1;
            let reply = answer(&mut run, mood);
            ledger.push(run);
            reply
        })
        .await;
        Self { upstream, ledger, calm }
    }

    /// From now on it executes at once and says so.
    pub(crate) fn calm(&self) {
        self.calm.store(true, Ordering::SeqCst);
    }

    pub(crate) fn ledger(&self) -> Vec<Execution> {
        self.ledger.lock().unwrap().clone()
    }
}

fn read(seen: &Seen) -> Execution {
    let header = |name| header(&seen.head, name).unwrap_or_default();
    let target = seen.target().to_owned();
    let operation = Operation::of_target(&target).map_or("none", Operation::name);
    Execution {
        number: 0,
        op: header("x-op").parse().unwrap_or(0),
        scope: Scope::new(&header("x-tenant-id"), operation, &header("idempotency-key")),
        target,
        body: String::from_utf8_lossy(&seen.body).into_owned(),
        record: header("oncegate-record"),
        attempt: header("oncegate-attempt").parse().unwrap_or(0),
        at: 0,
        answer: Answer::default(),
        whole: true,
    }
}

/// Makes the answer, writes it into the ledger, and says how it is sent.
fn answer(run: &mut Execution, mood: Mood) -> Reply {
    let number = run.number;
    let header = |name: &str, value: String| (name.to_owned(), value);
    let mut headers = vec![
        header("x-execution", number.to_string()),
        header("x-many", format!("a{number}")),
        header("etag", format!("\"e{number}\"")),
        header("x-many", format!("b{number}, c")),
        header("set-cookie", format!("session=s{number}")),
    ];
    let object = format!(r#"{{"id":"o-{number}","execution":{number},"exact":1.10}}"#);
    let json = header("content-type", "application/json".to_owned());
    let (status, body, chunked) = match mood.answer {
        Said::Created => {
            headers.extend([json, header("location", format!("/o/{number}"))]);
            (201, object, false)
        }
        Said::Final(204) => (204, String::new(), false),
        Said::Final(status) => {
            headers.push(json);
            (status, object, false)
        }
        Said::Busy(503) => {
            headers.push(header("retry-after", "1".to_owned()));
            (503, object, false)
        }
        Said::Busy(status) | Said::Doubtful(status) => (status, object, false),
        Said::Report { bytes, chunked } => {
            headers.push(header("content-type", "text/plain".to_owned()));
            let mut text = format!("report {number} ").repeat(bytes / 8);
            text.truncate(bytes);
            (200, text, chunked)
        }
    };
    run.answer = Answer { status, headers, body: body.into_bytes() };
    run.whole = mood.ends == Ends::Whole || (mood.ends == Ends::Cut && status == 204);
    reply(&run.answer, chunked, mood)
}

fn reply(answer: &Answer, chunked: bool, mood: Mood) -> Reply {
    let mut bytes = format!("HTTP/1.1 {} Said\r\n", answer.status).into_bytes();
    for (name, value) in &answer.headers {
        bytes.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
    }
    let length = answer.body.len();
    if chunked {
        bytes.extend_from_slice(
            format!("transfer-encoding: chunked\r\n\r\n{length:x}\r\n").as_bytes(),
        );
    } else if answer.status == 204 {
        bytes.extend_from_slice(b"\r\n");
    } else {
        bytes.extend_from_slice(format!("content-length: {length}\r\n\r\n").as_bytes());
    }
    let half = bytes.len() + length / 2;
    bytes.extend_from_slice(&answer.body);
    if chunked {
        bytes.extend_from_slice(b"\r\n0\r\n\r\n");
    }
    let reply = match mood.ends {
        Ends::Whole => Reply::keep(bytes),
        Ends::Cut => Reply::fin(&bytes[..half]),
        Ends::Closed => Reply::fin(""),
        Ends::Reset => Reply::reset(""),
    };
    reply.after(Duration::from_millis(mood.delay_ms))
}
