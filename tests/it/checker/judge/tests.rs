//! The judge, judged: an honest history is found good, and a history that breaks one promise is found out.

use super::super::history::{Delivery, Question, Sleep};
use super::*;

/// Puts a history together, in the order of time.
#[derive(Default)]
struct Made {
    history: History,
    time: u64,
}

const BODY: &str = r#"{"ref":"r","amount":7,"items":[{"sku":"s0"}]}"#;
const OTHER: &str = r#"{"ref":"r","amount":8,"items":[{"sku":"s0"}]}"#;

impl Made {
    /// A request that the API answers with this status: the execution's place in the ledger.
    fn execution(&mut self, scope: &Scope, record: &str, attempt: u64, status: u16) -> usize {
        self.time += 1;
        let number = self.history.executions.len() as u64 + 1;
        let header = |name: &str, value: String| (name.to_owned(), value);
        let headers = vec![
            header("x-execution", number.to_string()),
            header("x-many", format!("a{number}")),
            header("x-many", format!("b{number}")),
            header("set-cookie", format!("s{number}")),
        ];
        let body = format!(r#"{{"id":"o-{number}"}}"#).into_bytes();
        self.history.executions.push(Execution {
            number,
            op: self.history.ops.len() as u64 + 1,
            scope: scope.clone(),
            target: "/t".into(),
            body: BODY.into(),
            record: record.into(),
            attempt,
            at: self.time,
            answer: Answer { status, headers, body },
            whole: true,
            made: true,
        });
        self.history.executions.len() - 1
    }

    /// A request and what it is told.
    fn op(&mut self, scope: &Scope, body: &str, told: Told) {
        let op = Op {
            id: self.history.ops.len() as u64 + 1,
            gateway: 0,
            scope: scope.clone(),
            target: "/t".into(),
            body: body.into(),
            invoked: self.time + 1,
            ended: self.time + 2,
            told,
        };
        self.time += 3;
        self.history.ops.push(op);
    }

    /// Told the answer of an execution, with headers of the gateway's.
    fn answered(&mut self, run: usize, says: &[(&str, &str)]) {
        let run = self.history.executions[run].clone();
        let mut answer = run.answer;
        if says.iter().any(|(name, _)| *name == "idempotent-replayed") {
            answer.headers.retain(|(name, _)| name != "set-cookie");
        }
        answer.headers.push(("oncegate-record".into(), run.record));
        answer.headers.extend(says.iter().map(|(name, value)| ((*name).into(), (*value).into())));
        self.op(&run.scope, BODY, Told::Answer(answer));
    }

    /// The API is asked about a scope.
    fn question(&mut self, scope: &Scope, told: Asked) {
        self.time += 1;
        let (scope, at) = (scope.clone(), self.time);
        self.history.questions.push(Question { scope, gateway: 0, at, told });
    }

    /// Forwarded past the store: its place in the ledger.
    fn bypassed(&mut self, scope: &Scope) -> usize {
        let run = self.execution(scope, "", 0, 201);
        let mut answer = self.history.executions[run].answer.clone();
        answer.headers.push(("oncegate-bypassed".into(), "true".into()));
        self.op(scope, BODY, Told::Answer(answer));
        run
    }

    fn refused(&mut self, scope: &Scope, body: &str, record: &str, problem: &str) {
        let says = [("content-type", "application/problem+json"), ("oncegate-record", record)];
        let headers = says.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let body_of = format!(r#"{{"type":"urn:oncegate:problem:{problem}"}}"#).into_bytes();
        self.op(scope, body, Told::Answer(Answer { status: 409, headers, body: body_of }));
    }

    /// A completed row with its events, delivered.
    fn completed(
        &mut self,
        scope: &Scope,
        record: &str,
        attempt: u64,
        answer: &Answer,
        whole: bool,
    ) {
        let mut answer = answer.clone();
        answer.headers.retain(|(name, _)| name != "set-cookie");
        let kept = Some((answer.status, answer.headers, whole.then_some(answer.body)));
        let row = Row {
            scope: scope.clone(),
            record: record.into(),
            attempt,
            status: "completed".into(),
            answer: kept,
        };
        for (kind, data) in expected(&row, BODY) {
            let id = format!("e{}", self.history.events.len());
            let data: Value = serde_json::from_str(&data).unwrap();
            let payload = json!({
                "type": kind, "tenant": scope.tenant, "operation": scope.operation,
                "idempotency_key": scope.key, "id": id, "data": data,
            });
            let payload = payload.to_string().into_bytes();
            let delivery =
                Delivery { id: id.clone(), body: payload.clone(), verified: true, taken: true };
            self.history.deliveries.push(delivery);
            self.history.events.push(Event {
                id,
                record: record.into(),
                scope: scope.clone(),
                kind,
                status: "sent".into(),
                payload,
            });
        }
        self.history.rows.push(row);
    }

    fn unknown(&mut self, scope: &Scope, record: &str) {
        self.history.rows.push(Row {
            scope: scope.clone(),
            record: record.into(),
            attempt: 1,
            status: "unknown".into(),
            answer: None,
        });
    }
}

const KEPT: (&str, &str) = ("oncegate-expires", "some day");
const REPLAYED: (&str, &str) = ("idempotent-replayed", "true");

fn order() -> Scope {
    Scope::new("acme", "orders.create", "k1")
}

fn payment() -> Scope {
    Scope::new("bolt", "payments.create", "k1")
}

fn report() -> Scope {
    Scope::new("cora", "reports.create", "k1")
}

fn slot() -> Scope {
    Scope::new("acme", "slots.put", "k1")
}

fn freed_by_hand() -> Scope {
    Scope::new("bolt", "orders.create", "k2")
}

fn completed_by_hand() -> Scope {
    Scope::new("cora", "orders.create", "k2")
}

fn lost() -> Scope {
    Scope::new("cora", "slots.put", "k9")
}

fn refund() -> Scope {
    Scope::new("acme", "refunds.create", "k5")
}

fn refunded_again() -> Scope {
    Scope::new("bolt", "refunds.create", "k5")
}

fn pass() -> Scope {
    Scope::new("cora", "passes.create", "k5")
}

/// A refund whose answer was lost and is found, one that was not made and is executed again, and a pass that expires.
fn asked_and_expired(made: &mut Made) {
    let found = made.execution(&refund(), "r10", 1, 201);
    let number = made.history.executions[found].number;
    made.refused(&refund(), BODY, "r10", "upstream-failed");
    made.question(&refund(), Asked::Found(number));
    let json = ("content-type".to_owned(), "application/json".to_owned());
    let said = Answer { status: 201, headers: vec![json], body: found_body(number).into_bytes() };
    let mut replay = said.clone();
    for (name, value) in [KEPT, REPLAYED, ("oncegate-record", "r10")] {
        replay.headers.push((name.into(), value.into()));
    }
    made.op(&refund(), BODY, Told::Answer(replay));
    made.completed(&refund(), "r10", 1, &said, true);

    let first = made.execution(&refunded_again(), "r11", 1, 502);
    made.history.executions[first].made = false;
    made.answered(first, &[]);
    made.question(&refunded_again(), Asked::NotFound);
    let second = made.execution(&refunded_again(), "r11", 2, 201);
    made.answered(second, &[KEPT]);
    let answer = made.history.executions[second].answer.clone();
    made.completed(&refunded_again(), "r11", 2, &answer, true);

    for (record, replays) in [("r12", 1), ("r13", 0)] {
        let life = Life { made: made.time as i64, ..Life::default() };
        let run = made.execution(&pass(), record, 1, 201);
        made.answered(run, &[KEPT]);
        for _ in 0..replays {
            made.answered(run, &[KEPT, REPLAYED]);
        }
        made.time += 10;
        let expires = Some(made.time as i64);
        made.history.lives.insert(record.into(), Life { expires, ..life });
        let answer = made.history.executions[run].answer.clone();
        made.completed(&pass(), record, 1, &answer, true);
    }
    let gone = made.history.rows.iter().position(|row| row.record == "r12").unwrap();
    let gone = made.history.rows.remove(gone);
    made.history.past.push(gone);
    made.history.lives.get_mut("r12").unwrap().gone = Some(made.history.lives["r13"].made);
}

/// All that may happen, honestly. Requests 1 to 3 are the order's, 4 and 5 the payment's, and so on.
fn honest() -> History {
    let mut made = Made::default();
    let first = made.execution(&order(), "r1", 1, 201);
    made.answered(first, &[KEPT]);
    made.answered(first, &[KEPT, REPLAYED]);
    made.refused(&order(), OTHER, "r1", "request-mismatch");

    made.execution(&payment(), "r2", 1, 201);
    made.refused(&payment(), BODY, "r2", "upstream-failed");
    let second = made.execution(&payment(), "r2", 2, 201);
    made.answered(second, &[KEPT]);

    let large = made.execution(&report(), "r3", 1, 200);
    made.history.executions[large].answer.body = vec![b'x'; REPORT_MAX + 1];
    made.answered(large, &[KEPT]);
    made.refused(&report(), BODY, "r3", "response-not-retained");

    let busy = made.execution(&slot(), "r4", 1, 429);
    made.answered(busy, &[]);
    let free = made.execution(&slot(), "r5", 1, 201);
    made.answered(free, &[KEPT]);

    made.execution(&freed_by_hand(), "r6", 1, 201);
    made.refused(&freed_by_hand(), BODY, "r6", "upstream-timeout");
    made.history.acts.push(("r6".into(), Act::Release));
    let again = made.execution(&freed_by_hand(), "r7", 1, 201);
    made.answered(again, &[("oncegate-stored", "false")]);

    made.execution(&completed_by_hand(), "r8", 1, 201);
    made.refused(&completed_by_hand(), BODY, "r8", "upstream-timeout");
    let said = Answer {
        status: 201,
        headers: vec![("x-operator".into(), "1".into())],
        body: br#"{"id":"h-1"}"#.to_vec(),
    };
    made.history.acts.push(("r8".into(), Act::Complete));
    made.history.by_hand.insert("r8".into(), vec![said.clone()]);
    let mut replay = said.clone();
    for (name, value) in [KEPT, REPLAYED, ("oncegate-record", "r8")] {
        replay.headers.push((name.into(), value.into()));
    }
    made.op(&completed_by_hand(), BODY, Told::Answer(replay));

    made.execution(&lost(), "r9", 1, 201);
    made.op(&lost(), BODY, Told::Nothing("hung up".into()));
    made.refused(&lost(), BODY, "r9", "outcome-unknown");

    let answer = |run: usize| made.history.executions[run].answer.clone();
    let answers = [answer(first), answer(second), answer(large), answer(free), answer(again)];
    made.completed(&order(), "r1", 1, &answers[0], true);
    made.completed(&payment(), "r2", 2, &answers[1], true);
    made.completed(&report(), "r3", 1, &answers[2], false);
    made.completed(&slot(), "r5", 1, &answers[3], true);
    made.completed(&freed_by_hand(), "r7", 1, &answers[4], true);
    made.completed(&completed_by_hand(), "r8", 2, &said, true);
    made.unknown(&lost(), "r9");
    asked_and_expired(&mut made);
    made.history
}

/// The same, where requests may go past the store.
fn honest_bypass() -> History {
    let mut made = Made { history: honest(), time: 10_000 };
    made.history.bypass = true;
    // What is kept already is executed again, twice; and what is not reached is not.
    made.bypassed(&order());
    made.bypassed(&order());
    let says = [("content-type", "application/problem+json"), ("oncegate-bypassed", "true")];
    let headers = says.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    let body = br#"{"type":"urn:oncegate:problem:upstream-unreachable"}"#.to_vec();
    made.op(&order(), BODY, Told::Answer(Answer { status: 502, headers, body }));
    made.history
}

impl History {
    fn op(&mut self, id: usize) -> &mut Op {
        &mut self.ops[id - 1]
    }

    fn answer(&mut self, id: usize) -> &mut Answer {
        let Told::Answer(answer) = &mut self.op(id).told else { panic!("op {id} has an answer") };
        answer
    }

    /// The place in the ledger of an attempt.
    fn run(&self, record: &str, attempt: u64) -> usize {
        let is = |run: &Execution| run.record == record && run.attempt == attempt;
        self.executions.iter().position(is).unwrap()
    }

    fn row(&mut self, scope: &Scope) -> &mut Row {
        self.rows.iter_mut().find(|row| row.scope == *scope).unwrap()
    }

    /// One more execution like this one, counted from 0, as another request's.
    fn executes_again(&mut self, run: usize, record: &str, attempt: u64) {
        let mut again = self.executions[run].clone();
        again.number = self.executions.len() as u64 + 1;
        again.op = 1000 + again.number;
        (again.record, again.attempt) = (record.into(), attempt);
        self.executions.push(again);
    }

    /// One more request like this one, at the end.
    fn asks_again(&mut self, id: usize) -> &mut Answer {
        let mut op = self.op(id).clone();
        op.id = self.ops.len() as u64 + 1;
        (op.invoked, op.ended) = (op.invoked + 1000, op.ended + 1000);
        self.ops.push(op);
        let last = self.ops.len();
        self.answer(last)
    }
}

fn found(history: &History) -> BTreeSet<Rule> {
    judge(history).into_iter().map(|violation| violation.rule).collect()
}

/// Breaks the honest history in one way, which must be found out by this rule.
fn breaks(rule: Rule, how: &str, breaking: impl FnOnce(&mut History)) {
    breaks_of(honest(), rule, how, breaking);
}

fn breaks_of(mut history: History, rule: Rule, how: &str, breaking: impl FnOnce(&mut History)) {
    breaking(&mut history);
    let found = judge(&history);
    assert!(found.iter().any(|violation| violation.rule == rule), "{how}: {found:?}");
}

#[test]
fn an_honest_history_is_found_good() {
    for history in [honest(), honest_bypass()] {
        let found = judge(&history);
        assert!(found.is_empty(), "{found:?}");
    }
}

#[test]
fn what_is_excused_is_no_violation() {
    let mut history = honest();
    // Sent before an operator released it, and arriving late.
    let late = history.executions.iter().position(|run| run.record == "r6").unwrap();
    let late = history.executions.remove(late);
    history.executions.push(late);
    // The retry route's upstream is asked a third time before the second attempt has ended.
    history.executes_again(1, "r2", 0);
    // A replica that has lost its database says so, whatever is kept elsewhere.
    history.asks_again(3).body = br#"{"type":"urn:oncegate:problem:store-unavailable"}"#.to_vec();
    // The API finds what an operator has released, since the key is the same.
    let made = history.run("r10", 1);
    history.executions[made].record = "r20".into();
    history.acts.push(("r20".into(), Act::Release));
    // An attempt of a process that slept too long, after a question has let the next one go.
    let late = history.run("r11", 1);
    let mut late = history.executions.remove(late);
    let (op, lease) = (history.op(late.op as usize), LEASE_MS * 1000);
    let sleep = Sleep { gateway: op.gateway, since: op.invoked, until: op.invoked + lease };
    (late.made, late.at) = (true, sleep.until + 1);
    history.sleeps.push(sleep);
    history.executions.push(late);
    assert_eq!(found(&history), BTreeSet::new());
}

#[test]
fn a_second_execution_is_found_out() {
    let rule = Rule::Once;
    breaks(rule, "under a new record", |h| h.executes_again(0, "r10", 1));
    breaks(rule, "as a later attempt where unknown is held", |h| h.executes_again(0, "r1", 2));
    breaks(rule, "of one attempt where unknown is retried", |h| h.executes_again(1, "r2", 1));
    breaks(rule, "under a new record where unknown is retried", |h| {
        h.executes_again(1, "r10", 1);
    });
    breaks(rule, "for one request", |h| {
        h.executes_again(4, "r10", 1);
        h.executions.last_mut().unwrap().op = h.executions[4].op;
    });
    breaks(rule, "after an answer that frees only the first attempt", |h| {
        h.executions[2].answer.status = 429;
        h.executes_again(2, "r10", 1);
    });
    breaks(rule, "after an operator released something else", |h| h.acts[0].0 = "r1".into());
    breaks(rule, "of what is held", |h| h.executes_again(h.run("r9", 1), "r20", 1));
    breaks(rule, "of what the API had made, and was asked about", |h| {
        let first = h.run("r11", 1);
        h.executions[first].made = true;
    });
    breaks(rule, "of what has not expired yet", |h| h.lives.get_mut("r13").unwrap().made -= 1);
    breaks(rule, "of what never was completed, and is made to expire", |h| {
        h.lives.get_mut("r12").unwrap().expires = None;
    });
    breaks_of(honest_bypass(), rule, "of one request past the store", |h| {
        let last = h.executions.len() - 1;
        h.executes_again(last, "", 0);
        h.executions.last_mut().unwrap().op = h.executions[last].op;
    });
}

#[test]
fn an_execution_without_an_answer_to_the_question_is_found_out() {
    let rule = Rule::Asked;
    let not_found = |h: &mut History, change: fn(&mut Question)| {
        h.questions.iter_mut().filter(|q| q.told == Asked::NotFound).for_each(change);
    };
    breaks(rule, "nobody asked", |h| h.questions.clear());
    breaks(rule, "the question failed", |h| not_found(h, |q| q.told = Asked::Nothing));
    breaks(rule, "it was asked before the first attempt", |h| not_found(h, |q| q.at = 0));
    breaks(rule, "it was asked afterwards", |h| not_found(h, |q| q.at += 1000));
    breaks(rule, "another one asked", |h| not_found(h, |q| q.gateway = 1));
    breaks(rule, "a later question failed", |h| {
        let failed = h.questions.last().unwrap().clone();
        h.questions.push(Question { told: Asked::Nothing, ..failed });
        // All that happened since is later by as much.
        let at = h.questions.last().unwrap().at;
        h.executions.iter_mut().filter(|run| run.at > at).for_each(|run| run.at += HELD_UP);
    });
    breaks(rule, "it was asked about another", |h| not_found(h, |q| q.scope = refund()));
}

#[test]
fn what_goes_past_the_store_where_it_may_not_or_says_nothing_is_found_out() {
    let rule = Rule::Bypassed;
    let breaks = |how: &str, breaking: fn(&mut History)| {
        breaks_of(honest_bypass(), rule, how, breaking);
    };
    breaks("where it is refused", |h| h.bypass = false);
    breaks("without its mark", |h| {
        let last = h.ops.len() - 1;
        h.answer(last).headers.retain(|(name, _)| name != "oncegate-bypassed");
    });
    breaks("with a promise to keep it", |h| {
        let last = h.ops.len() - 1;
        h.answer(last).headers.push((KEPT.0.into(), KEPT.1.into()));
    });
    breaks("with another body", |h| {
        let last = h.ops.len() - 1;
        h.answer(last).body.push(b'!');
    });
    breaks("with the answer of another execution", |h| {
        let last = h.ops.len() - 1;
        h.op(last).id = 1;
    });
    breaks("not reached, and executed", |h| {
        let last = h.ops.len();
        h.executes_again(0, "", 0);
        h.executions.last_mut().unwrap().op = last as u64;
    });
    breaks("marked, and reserved all the same", |h| {
        h.executions.last_mut().unwrap().record = "r20".into();
    });
}

#[test]
fn another_answer_than_the_first_is_found_out() {
    let rule = Rule::SameAnswer;
    breaks(rule, "its body", |h| h.answer(2).body.push(b'!'));
    breaks(rule, "its status", |h| h.answer(2).status = 200);
    breaks(rule, "a header less", |h| {
        h.answer(2).headers.remove(1);
    });
    breaks(rule, "equal names in another order", |h| h.answer(2).headers.swap(1, 2));
    breaks(rule, "another record", |h| {
        let headers = &mut h.answer(2).headers;
        headers.iter_mut().find(|(name, _)| name == "oncegate-record").unwrap().1 = "r5".into();
    });
    breaks(rule, "a replay without its mark", |h| {
        h.answer(2).headers.retain(|(name, _)| name != "idempotent-replayed");
    });
    breaks(rule, "a cut answer as a whole one", |h| h.executions[0].whole = false);
    breaks(rule, "a doubtful answer as a kept one", |h| {
        h.executions[0].answer.status = 502;
        (h.answer(1).status, h.answer(2).status) = (502, 502);
    });
    breaks(rule, "an answer that is kept and is not", |h| {
        h.answer(1).headers.push(("oncegate-stored".into(), "false".into()));
    });
    breaks(rule, "unknown after it was kept", |h| {
        h.asks_again(3).body = br#"{"type":"urn:oncegate:problem:outcome-unknown"}"#.to_vec();
    });
    breaks(rule, "two of them for one scope", |h| {
        h.executes_again(0, "r1", 1);
        let (number, body) = (h.executions.len(), h.executions[0].answer.body.clone());
        let answer = h.asks_again(2);
        answer.headers[0].1 = number.to_string();
        answer.body = body;
    });
    breaks(rule, "a row with another body", |h| {
        h.row(&order()).answer.as_mut().unwrap().2 = Some(b"{}".to_vec());
    });
    breaks(rule, "a row that has lost its body", |h| {
        h.row(&order()).answer.as_mut().unwrap().2 = None;
    });
    breaks(rule, "a row of an earlier attempt", |h| h.row(&payment()).attempt = 1);
    breaks(rule, "a row that nobody executed", |h| h.executions.retain(|run| run.record != "r1"));
    breaks(rule, "what no operator said", |h| {
        h.by_hand.clear();
    });
    breaks(rule, "not retained, though small", |h| h.executions[3].answer.body.truncate(3));
    breaks(rule, "what no question has found", |h| h.questions.clear());
    breaks(rule, "what was found of another record", |h| {
        let found = h.run("r10", 1);
        h.executions[found].record = "r20".into();
    });
    breaks(rule, "something else than was found", |h| {
        let body = br#"{"execution":8,"id":"o-9"}"#.to_vec();
        let found = h.run("r10", 1);
        let op = h.executions[found].op as usize + 1;
        h.answer(op).body = body;
    });
    breaks(rule, "a row with what nothing has found", |h| {
        h.row(&refund()).answer.as_mut().unwrap().2 = Some(b"{}".to_vec());
    });
    breaks(rule, "what has expired long ago", |h| {
        let op = h.executions[h.run("r12", 1)].op as usize;
        h.asks_again(op + 1);
        let late = h.ops.last_mut().unwrap();
        (late.invoked, late.ended) = (late.invoked + 1_000_000, late.ended + 1_000_000);
    });
    breaks(rule, "a new answer before the old one has expired", |h| {
        h.lives.get_mut("r12").unwrap().expires = Some(10_000_000);
    });
    breaks(rule, "a problem for no reason", |h| {
        h.answer(3).body = br#"{"type":"urn:oncegate:problem:key-invalid"}"#.to_vec();
    });
}

#[test]
fn a_mismatch_that_does_something_is_found_out() {
    let rule = Rule::Mismatch;
    breaks(rule, "it is executed", |h| {
        h.executes_again(0, "r10", 1);
        h.executions.last_mut().unwrap().op = 3;
    });
    breaks(rule, "it gets the answer of the first request", |h| h.op(2).body = OTHER.into());
    breaks(rule, "it is the same request", |h| h.op(3).body = BODY.into());
}

#[test]
fn events_without_their_outcome_and_outcomes_without_events_are_found_out() {
    let rule = Rule::Events;
    breaks(rule, "one is missing", |h| {
        h.events.remove(0);
    });
    breaks(rule, "one is written twice", |h| {
        let mut twin = h.events[0].clone();
        twin.id = "twin".into();
        h.events.push(twin);
    });
    breaks(rule, "of a record that is unknown", |h| h.row(&order()).status = "unknown".into());
    breaks(rule, "with other data", |h| {
        let text = String::from_utf8(h.events[0].payload.clone()).unwrap();
        h.events[0].payload = text.replace('7', "9").replace("acme", "bolt").into_bytes();
    });
    breaks(rule, "of another scope", |h| h.events[0].scope = slot());
    breaks(rule, "one of an expired record is missing", |h| {
        h.events.retain(|event| event.record != "r12");
    });
}

#[test]
fn an_event_that_does_not_arrive_as_it_is_written_is_found_out() {
    let rule = Rule::Delivered;
    breaks(rule, "never", |h| {
        let id = h.events[0].id.clone();
        h.deliveries.retain(|delivery| delivery.id != id);
    });
    breaks(rule, "with other bytes", |h| h.deliveries[0].body.push(b' '));
    breaks(rule, "under another id", |h| h.deliveries[0].id = "other".into());
    breaks(rule, "with a bad signature", |h| h.deliveries[0].verified = false);
    breaks(rule, "or is not taken", |h| h.deliveries[0].taken = false);
    breaks(rule, "given up", |h| h.events[0].status = "dead".into());
}

#[test]
fn what_stays_in_progress_is_found_out() {
    breaks(Rule::Quiet, "a row", |h| h.row(&lost()).status = "in_progress".into());
    breaks(Rule::Quiet, "a wait in vain", |h| h.restless.push("1 records in progress".into()));
}

#[test]
fn somebody_elses_answer_is_found_out() {
    let rule = Rule::Foreign;
    breaks(rule, "of another tenant", |h| h.op(2).scope.tenant = "bolt".into());
    breaks(rule, "of another operation", |h| h.op(2).scope.operation = "slots.put".into());
    breaks(rule, "of nobody", |h| h.answer(2).headers[0].1 = "99".into());
    breaks(rule, "a session that was opened for the first", |h| {
        h.answer(2).headers.push(("set-cookie".into(), "s1".into()));
    });
}

#[test]
fn a_panic_is_found_out() {
    breaks(Rule::Panic, "in a log", |h| h.logs.push("x\nthread 'a' panicked at b\n".into()));
}

#[test]
fn an_execution_after_a_promise_of_none_is_found_out() {
    for problem in NOTHING_DONE.iter().filter(|problem| **problem != "request-mismatch") {
        breaks(Rule::NotSent, problem, |h| {
            let body = format!(r#"{{"type":"urn:oncegate:problem:{problem}"}}"#);
            // The payment's first request, which was executed.
            h.answer(4).body = body.into_bytes();
        });
    }
}

#[test]
fn an_execution_that_is_forgotten_is_found_out() {
    let rule = Rule::Remembered;
    breaks(rule, "its row is gone", |h| h.rows.retain(|row| row.scope != lost()));
    breaks(rule, "its row is another's", |h| h.row(&lost()).record = "r20".into());
    breaks(rule, "its row is gone before its time", |h| {
        h.lives.get_mut("r12").unwrap().gone = Some(0);
    });
    breaks(rule, "its row is gone, and nothing of its kind expires", |h| {
        let row = h.rows.iter().position(|row| row.scope == order()).unwrap();
        let row = h.rows.remove(row);
        let life = Life { made: 0, expires: Some(1), gone: Some(2) };
        h.lives.insert(row.record.clone(), life);
        h.past.push(row);
    });
    breaks(rule, "though it was in the spill", |h| {
        let free = h.ops.iter().position(|op| op.scope == freed_by_hand()).unwrap() + 2;
        h.answer(free).headers.retain(|(name, _)| name != "oncegate-stored");
        h.row(&freed_by_hand()).status = "unknown".into();
    });
    breaks(rule, "though it was told to be kept", |h| h.row(&order()).status = "unknown".into());
}
