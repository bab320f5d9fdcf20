//! The API of a run: writes down each execution, and answers as the seed says. It can be asked what it has made, and then
//! it tells the truth or nothing that could be taken for it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::history::{Answer, Asked, Clock, Execution, Question, Scope};
use super::plan::{self, Ends, Mood, Operation, QUESTION_MS, Said};
use crate::support::raw::header;
use crate::support::upstream::{Reply, Seen, Upstream};

pub(crate) struct Api {
    pub(crate) upstream: Upstream,
    books: Arc<Mutex<Books>>,
    calm: Arc<AtomicBool>,
}

#[derive(Default)]
struct Books {
    ledger: Vec<Execution>,
    questions: Vec<Question>,
    /// How often each scope was executed.
    turns: HashMap<Scope, usize>,
}

impl Api {
    pub(crate) async fn start(seed: u64, clock: Clock) -> Self {
        let books = Arc::new(Mutex::new(Books::default()));
        let calm = Arc::new(AtomicBool::new(false));
        let (ours, is_calm) = (Arc::clone(&books), Arc::clone(&calm));
        let upstream = Upstream::start(move |_, seen| {
            let mut books = ours.lock().unwrap();
            let calm = is_calm.load(Ordering::SeqCst);
            if let Some(scope) = asked_about(seen) {
                let gateway = header(&seen.head, "x-gateway").and_then(|text| text.parse().ok());
                let (gateway, at) = (gateway.expect("who asks"), clock.now());
                let question = Question { scope, gateway, at, told: Asked::Nothing };
                return books.look_up(seed, question, calm);
            }
            let mut run = read(seen);
            run.at = clock.now();
            let mood = books.mood(seed, &run.scope, calm);
            run.number = books.ledger.len() as u64 + 1;
            let reply = answer(&mut run, mood);
            books.ledger.push(run);
            reply
        })
        .await;
        Self { upstream, books, calm }
    }

    /// From now on it executes at once and says so.
    pub(crate) fn calm(&self) {
        self.calm.store(true, Ordering::SeqCst);
    }

    pub(crate) fn ledger(&self) -> Vec<Execution> {
        self.books.lock().unwrap().ledger.clone()
    }

    pub(crate) fn questions(&self) -> Vec<Question> {
        self.books.lock().unwrap().questions.clone()
    }
}

impl Books {
    fn mood(&mut self, seed: u64, scope: &Scope, calm: bool) -> Mood {
        let turn = self.turns.entry(scope.clone()).or_default();
        *turn += 1;
        if calm {
            return Mood { delay_ms: 0, answer: Said::Created, ends: Ends::Whole, made: true };
        }
        plan::mood(seed, scope, *turn - 1)
    }

    /// Answers a question. What came unprotected is not in the books that are asked.
    fn look_up(&mut self, seed: u64, question: Question, calm: bool) -> Reply {
        let scope = &question.scope;
        let made = |run: &&Execution| run.made && run.scope == *scope && !run.record.is_empty();
        let found = self.ledger.iter().find(made).map(|run| run.number);
        let nth = self.questions.iter().filter(|other| other.scope == *scope).count();
        let how = if calm { plan::Reply::Truth } else { plan::reply(seed, scope, nth) };
        let items: Vec<_> = found.iter().map(|number| found_body(*number)).collect();
        let truth = format!(r#"{{"total":{},"items":[{}]}}"#, items.len(), items.join(","));
        let told = match how {
            plan::Reply::Truth | plan::Reply::Late => found.map_or(Asked::NotFound, Asked::Found),
            plan::Reply::Cut | plan::Reply::Nonsense(..) => Asked::Nothing,
        };
        self.questions.push(Question { told, ..question });
        match how {
            plan::Reply::Truth => Reply::keep(json(200, &truth)),
            plan::Reply::Late => {
                let late = Duration::from_millis(QUESTION_MS + 300);
                Reply::keep(json(200, &truth)).after(late)
            }
            plan::Reply::Cut => {
                let whole = json(200, &truth);
                Reply::fin(&whole[..whole.len() - 3])
            }
            plan::Reply::Nonsense(status, body) => Reply::keep(json(status, body)),
        }
    }
}

/// What is kept of an execution that a question has found. Names in their order, so that any writer of JSON gives this.
pub(crate) fn found_body(number: u64) -> String {
    format!(r#"{{"execution":{number},"id":"o-{number}"}}"#)
}

fn json(status: u16, body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// Whose execution a question is about; none of a request that is to be executed.
fn asked_about(seen: &Seen) -> Option<Scope> {
    if !seen.head.starts_with("GET ") {
        return None;
    }
    let query = seen.target().split_once('?').map_or("", |(_, query)| query);
    let of = |wanted: &str| {
        let mut pairs = form_urlencoded::parse(query.as_bytes());
        pairs.find(|(name, _)| name == wanted).map_or(String::new(), |(_, value)| value.into())
    };
    let operation = Operation::of_target(seen.target()).map_or("none", Operation::name);
    Some(Scope::new(&of("tenant"), operation, &of("ref")))
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
        made: true,
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
    run.made = mood.made;
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
