//! The judge: what a history must not contain. Pure, so that made-up histories check it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::history::{Act, Answer, Event, Execution, History, Op, Row, Scope, Told};
use super::plan::{Operation, REPORT_MAX};

/// What is promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rule {
    /// One execution of a scope, but for the named exceptions; one of an attempt and of a request without any.
    Once,
    /// What is kept is answered again, the same in status, headers and body.
    SameAnswer,
    /// Another request under a used key is refused and never executed.
    Mismatch,
    /// A record is completed if and only if its events are written, each of them and no other.
    Events,
    /// Every event arrives, always under the same id with the same bytes, and nothing else does.
    Delivered,
    /// No record stays in progress.
    Quiet,
    /// Nobody gets the answer to another scope.
    Foreign,
    /// No process panics or finds itself in a state that cannot be.
    Panic,
    /// Who is told that nothing was done has had nothing done.
    NotSent,
    /// What has perhaps executed is remembered.
    Remembered,
}

/// What is wrong, and with what.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) rule: Rule,
    pub(crate) about: String,
}

/// Everything that is wrong with a history.
pub(crate) fn judge(history: &History) -> Vec<Violation> {
    let mut judge = Judge::new(history);
    judge.executions();
    for op in &history.ops {
        judge.told(op);
    }
    judge.kept();
    judge.remembered();
    judge.rows();
    judge.events();
    judge.deliveries();
    judge.processes();
    judge.found
}

/// Told so, a request has not been executed.
const NOTHING_DONE: [&str; 6] = [
    "request-mismatch",
    "in-progress",
    "outcome-unknown",
    "upstream-unreachable",
    "overloaded",
    "store-unavailable",
];

/// Told so, it may have been.
const DOUBT: [&str; 2] = ["upstream-failed", "upstream-timeout"];

struct Judge<'h> {
    history: &'h History,
    by_number: BTreeMap<u64, &'h Execution>,
    by_scope: BTreeMap<&'h Scope, Vec<&'h Execution>>,
    by_op: BTreeMap<u64, Vec<&'h Execution>>,
    by_attempt: BTreeMap<(&'h str, u64), Vec<&'h Execution>>,
    rows: BTreeMap<&'h Scope, &'h Row>,
    ops: BTreeMap<&'h Scope, Vec<&'h Op>>,
    released: BTreeSet<&'h str>,
    completed: BTreeSet<&'h str>,
    found: Vec<Violation>,
}

/// What an answer of the API means: the table of the contract once more, not the gateway's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Stored,
    Released,
    Unknown,
}

fn class(answer: &Answer) -> Class {
    match (answer.status, answer.header("retry-after").is_some()) {
        (401 | 403 | 407 | 408 | 421 | 425 | 429, _) | (503, true) => Class::Released,
        (502 | 504, _) | (503, false) => Class::Unknown,
        _ => Class::Stored,
    }
}

/// Whether the gateway keeps this execution's answer without its body.
fn too_large(run: &Execution) -> bool {
    run.scope.operation == Operation::Reports.name() && run.answer.body.len() > REPORT_MAX
}

/// Whether the API has said that it did not execute, and so the first attempt frees its key.
fn freed(run: &Execution) -> bool {
    run.attempt == 1 && run.whole && class(&run.answer) == Class::Released
}

fn retries(scope: &Scope) -> bool {
    Operation::of_name(&scope.operation).is_some_and(Operation::retries)
}

impl<'h> Judge<'h> {
    fn new(history: &'h History) -> Self {
        let mut judge = Self {
            history,
            by_number: BTreeMap::new(),
            by_scope: BTreeMap::new(),
            by_op: BTreeMap::new(),
            by_attempt: BTreeMap::new(),
            rows: history.rows.iter().map(|row| (&row.scope, row)).collect(),
            ops: BTreeMap::new(),
            released: BTreeSet::new(),
            completed: BTreeSet::new(),
            found: Vec::new(),
        };
        for run in &history.executions {
            judge.by_number.insert(run.number, run);
            judge.by_scope.entry(&run.scope).or_default().push(run);
            judge.by_op.entry(run.op).or_default().push(run);
            judge.by_attempt.entry((&run.record, run.attempt)).or_default().push(run);
        }
        for op in &history.ops {
            judge.ops.entry(&op.scope).or_default().push(op);
        }
        for (record, act) in &history.acts {
            match act {
                Act::Release => judge.released.insert(record),
                Act::Complete => judge.completed.insert(record),
            };
        }
        judge
    }

    fn wrong(&mut self, rule: Rule, about: String) {
        self.found.push(Violation { rule, about });
    }

    fn check(&mut self, right: bool, rule: Rule, about: impl FnOnce() -> String) {
        if !right {
            self.wrong(rule, about());
        }
    }

    /// Who executed how often.
    fn executions(&mut self) {
        let numbers = |runs: &[&Execution]| {
            runs.iter().map(|run| run.number.to_string()).collect::<Vec<_>>().join(", ")
        };
        let mut wrong = Vec::new();
        for ((record, attempt), runs) in &self.by_attempt {
            if runs.len() > 1 {
                let which = numbers(runs);
                wrong.push(format!("attempt {attempt} of {record} is executions {which}"));
            }
        }
        for (op, runs) in &self.by_op {
            if runs.len() > 1 {
                wrong.push(format!("op {op} is executions {}", numbers(runs)));
            }
        }
        for (scope, runs) in &self.by_scope {
            for (n, first) in runs.iter().enumerate() {
                for second in &runs[n + 1..] {
                    if !self.may_follow(first, second) {
                        let which = numbers(&[first, second]);
                        wrong.push(format!("{scope} is executions {which}"));
                    }
                }
            }
        }
        for about in wrong {
            self.wrong(Rule::Once, about);
        }
    }

    /// Whether one execution of a scope may have come to the API before another one.
    fn may_follow(&self, first: &Execution, second: &Execution) -> bool {
        let another_attempt = retries(&first.scope) && first.attempt != second.attempt;
        if first.record == second.record {
            return another_attempt;
        }
        // The second may be late: sent before its record was released, and delayed on its way.
        let by_hand = |run: &Execution| self.released.contains(run.record.as_str());
        freed(first) || by_hand(first) || by_hand(second)
    }

    /// One request and what it was told.
    fn told(&mut self, op: &'h Op) {
        let Told::Answer(answer) = &op.told else { return };
        let id = op.id;
        if let Some(problem) = answer.problem() {
            return self.problem(op, answer, &problem);
        }
        if answer.header("x-operator").is_some() {
            return self.by_hand(op, answer);
        }
        let number = answer.header("x-execution").and_then(|number| number.parse().ok());
        let run = number.and_then(|number: u64| self.by_number.get(&number).copied());
        let Some(run) = run else {
            return self.wrong(
                Rule::Foreign,
                format!("op {id} got an answer of nobody: {}", answer.brief()),
            );
        };
        let number = run.number;
        self.check(run.scope == op.scope, Rule::Foreign, || {
            format!("op {id} of {} got the answer of {}", op.scope, run.scope)
        });
        self.check(run.body == op.body && run.target == op.target, Rule::Mismatch, || {
            format!("op {id} got the answer of execution {number}, which is another request")
        });
        self.check(answer.record() == Some(&run.record), Rule::SameAnswer, || {
            format!("op {id} names another record than execution {number}")
        });
        let same = answer.status == run.answer.status
            && answer.end_to_end() == run.answer.end_to_end()
            && answer.body == run.answer.body;
        self.check(same && run.whole, Rule::SameAnswer, || {
            format!("op {id} got {}, execution {number} said {:?}", answer.brief(), run.answer)
        });
        self.standing(op, answer, run);
    }

    /// Whether an answer of the API says the right things about itself.
    fn standing(&mut self, op: &Op, answer: &Answer, run: &Execution) {
        let (id, number, class) = (op.id, run.number, class(&run.answer));
        let (kept, replayed) = (answer.kept(), answer.replayed());
        let stored = match class {
            // Neither: it is in the spill, see `spilled`.
            Class::Stored => !kept || !answer.not_stored(),
            // Its record had gone on meanwhile.
            Class::Released => !kept,
            Class::Unknown => !kept && !answer.not_stored(),
        };
        self.check(stored, Rule::SameAnswer, || {
            format!("op {id}: execution {number} is {class:?}, and the answer says otherwise")
        });
        self.check(!replayed || kept, Rule::SameAnswer, || {
            format!("op {id} got a replay of what is not kept")
        });
        self.check(!replayed || !too_large(run), Rule::SameAnswer, || {
            format!("op {id} got a replay of a body that is not retained")
        });
        if class == Class::Stored && !kept && !answer.not_stored() {
            self.spilled(op, run);
        }
        let own = run.op == id;
        self.check(own || replayed || class == Class::Released, Rule::SameAnswer, || {
            format!("op {id} got the answer of op {} without the mark of a replay", run.op)
        });
        let session = answer.header("set-cookie").is_some();
        self.check(session == (own && !replayed), Rule::Foreign, || {
            format!("op {id}: the session of op {} is {session}", run.op)
        });
    }

    /// What a replica has spilled is in the database in the end, unless somebody else had the record by then.
    fn spilled(&mut self, op: &Op, run: &Execution) {
        let record = run.record.as_str();
        let acted = self.released.contains(record) || self.completed.contains(record);
        let row = self.rows.get(&run.scope).copied();
        let stands = row.is_some_and(|row| {
            row.record == record && (row.status == "completed" || row.attempt > run.attempt)
        });
        self.check(acted || stands, Rule::Remembered, || {
            format!("op {} was answered from a spill, and the record is {row:?}", op.id)
        });
    }

    fn by_hand(&mut self, op: &Op, answer: &Answer) {
        let record = answer.record().unwrap_or_default();
        let meant = self.history.by_hand.get(record).into_iter().flatten();
        let known = meant.into_iter().any(|meant| {
            meant.status == answer.status
                && meant.body == answer.body
                && meant.end_to_end() == answer.end_to_end()
        });
        let (id, done) = (op.id, self.completed.contains(record));
        self.check(known && done && answer.kept() && answer.replayed(), Rule::SameAnswer, || {
            format!("op {id} got {}, which no operator said", answer.brief())
        });
        let row = self.rows.get(&op.scope).is_some_and(|row| row.record == record);
        self.check(row, Rule::Foreign, || format!("op {id} got the answer of record {record}"));
    }

    fn problem(&mut self, op: &'h Op, answer: &Answer, problem: &str) {
        let id = op.id;
        if NOTHING_DONE.contains(&problem) {
            let rule = if problem == "request-mismatch" { Rule::Mismatch } else { Rule::NotSent };
            let runs = self.by_op.get(&id).map_or(0, Vec::len);
            self.check(runs == 0, rule, || {
                format!("op {id} was told {problem}, and was executed {runs} times")
            });
        }
        if problem == "request-mismatch" {
            let others = self.ops.get(&op.scope).into_iter().flatten();
            let other = others.into_iter().any(|other| {
                (&other.target, &other.body) != (&op.target, &op.body) && other.invoked < op.ended
            });
            self.check(other, Rule::Mismatch, || {
                format!("op {id} is no other request than others")
            });
        } else if problem == "response-not-retained" {
            let record = answer.record().unwrap_or_default();
            let runs = self.by_scope.get(&op.scope).into_iter().flatten();
            let fits = |run: &&&Execution| {
                run.record == record && run.body == op.body && run.target == op.target
            };
            let large = runs.into_iter().filter(fits).any(|run| too_large(run));
            self.check(large, Rule::SameAnswer, || {
                format!("op {id}: {record} has no large answer")
            });
        } else if !NOTHING_DONE.contains(&problem) && !DOUBT.contains(&problem) {
            self.wrong(Rule::SameAnswer, format!("op {id} was told {problem}, for no reason"));
        }
    }

    /// What was kept stays, for everybody, from then on.
    fn kept(&mut self) {
        let scopes: Vec<_> = self.ops.iter().map(|(scope, ops)| (*scope, ops.clone())).collect();
        for (scope, ops) in scopes {
            let answers = |op: &'h Op| match &op.told {
                Told::Answer(answer) if answer.kept() => Some((op, answer)),
                Told::Answer(_) | Told::Nothing(_) => None,
            };
            let kept: Vec<_> = ops.iter().filter_map(|op| answers(op)).collect();
            let Some((first, answer)) = kept.iter().min_by_key(|(op, _)| op.ended) else {
                continue;
            };
            let mark = |answer: &Answer| {
                let by = ["x-execution", "x-operator"]
                    .map(|name| answer.header(name).map(str::to_owned));
                (answer.record().map(str::to_owned), answer.problem().is_none().then_some(by))
            };
            let marks: BTreeSet<_> = kept.iter().map(|(_, answer)| mark(answer)).collect();
            let records: BTreeSet<_> = marks.iter().map(|(record, _)| record).collect();
            let contents = marks.iter().filter(|(_, by)| by.is_some()).count();
            self.check(records.len() == 1 && contents <= 1, Rule::SameAnswer, || {
                format!("{scope} has several answers: {marks:?}")
            });
            let row = self.rows.get(scope).copied();
            let stands = row.is_some_and(|row| {
                row.status == "completed" && Some(row.record.as_str()) == answer.record()
            });
            self.check(stands, Rule::Remembered, || {
                format!("op {} of {scope} was told that its answer is kept: {row:?}", first.id)
            });
            for op in ops.iter().filter(|op| op.invoked > first.ended) {
                self.after(first, op);
            }
        }
    }

    /// A request that began when the answer had been kept: the answer, or a refusal for now.
    fn after(&mut self, first: &Op, op: &Op) {
        let Told::Answer(answer) = &op.told else { return };
        let same = (&first.target, &first.body) == (&op.target, &op.body);
        let right = match answer.problem().as_deref() {
            // A leader of its replica may have been at it since before.
            Some("store-unavailable" | "overloaded" | "in-progress") => true,
            Some("response-not-retained") => same,
            Some("request-mismatch") => !same,
            Some(_) => false,
            None => same && answer.kept(),
        };
        self.check(right, Rule::SameAnswer, || {
            format!(
                "op {} came after the answer of op {} was kept, and got {}",
                op.id,
                first.id,
                answer.brief()
            )
        });
    }

    /// What the API was asked has left a record, unless it is known not to have executed.
    fn remembered(&mut self) {
        for run in &self.history.executions {
            if freed(run) || self.released.contains(run.record.as_str()) {
                continue;
            }
            let row = self.rows.get(&run.scope).copied();
            let stands = row.is_some_and(|row| row.record == run.record);
            self.check(stands, Rule::Remembered, || {
                format!("execution {} of {} has no record: {row:?}", run.number, run.scope)
            });
        }
    }

    /// The tables' rows: each in a state that lasts, each answer somebody's.
    fn rows(&mut self) {
        for row in &self.history.rows {
            let Row { scope, record, status, .. } = row;
            if status != "completed" {
                self.check(status == "unknown", Rule::Quiet, || format!("{scope} is {status}"));
                continue;
            }
            let by_hand = self.completed.contains(record.as_str());
            let right = by_hand || self.kept_of(row).is_some_and(|run| is_answer(row, run));
            self.check(right, Rule::SameAnswer, || {
                format!("the row of {scope}, {record}, holds what nobody answered: {row:?}")
            });
        }
        for what in &self.history.restless {
            self.wrong(Rule::Quiet, what.clone());
        }
    }

    /// The execution whose answer a row holds: its last attempt's.
    fn kept_of(&self, row: &Row) -> Option<&'h Execution> {
        let runs = self.by_scope.get(&row.scope)?;
        let run =
            runs.iter().filter(|run| run.record == row.record).max_by_key(|run| run.attempt)?;
        (run.attempt == row.attempt).then_some(run)
    }

    /// Completed records and events: neither without the other.
    fn events(&mut self) {
        let mut written: BTreeMap<&str, Vec<&Event>> = BTreeMap::new();
        for event in &self.history.events {
            written.entry(&event.record).or_default().push(event);
        }
        let rows = self.history.rows.iter().filter(|row| row.status == "completed");
        for row in rows {
            let events = written.remove(row.record.as_str()).unwrap_or_default();
            let mut said: Vec<_> = events.iter().map(|event| said(event)).collect();
            said.sort();
            let bodies = self.bodies_of(row);
            let right = bodies.iter().any(|body| expected(row, body) == said);
            let scope = &row.scope;
            self.check(right, Rule::Events, || {
                let wanted = bodies.first().map(|body| expected(row, body));
                format!("{scope}, {}: events {said:?}, not {wanted:?}", row.record)
            });
            let own = events.iter().all(|event| event.scope == row.scope);
            self.check(own, Rule::Events, || format!("{scope}: events of others: {events:?}"));
        }
        for (record, events) in written {
            self.wrong(Rule::Events, format!("{record} is not completed, and has {events:?}"));
        }
    }

    /// The bodies that may have made a record: the executed one, or, where nothing was, any that was sent.
    fn bodies_of(&self, row: &Row) -> Vec<&'h str> {
        let runs = self.by_scope.get(&row.scope).into_iter().flatten();
        let run = runs.into_iter().find(|run| run.record == row.record);
        match run {
            Some(run) => vec![&run.body],
            None => {
                let ops = self.ops.get(&row.scope).into_iter().flatten();
                ops.into_iter().map(|op| op.body.as_str()).collect()
            }
        }
    }

    /// The sink and the outbox.
    fn deliveries(&mut self) {
        let events: BTreeMap<_, _> =
            self.history.events.iter().map(|event| (event.id.as_str(), event)).collect();
        self.check(events.len() == self.history.events.len(), Rule::Delivered, || {
            "two events have one id".into()
        });
        let mut arrived = BTreeSet::new();
        for delivery in &self.history.deliveries {
            let id = delivery.id.as_str();
            if delivery.taken {
                arrived.insert(id);
            }
            let right = events.get(id).is_some_and(|event| event.payload == delivery.body);
            self.check(right && delivery.verified, Rule::Delivered, || {
                format!("{id} arrived with other bytes than are written, or is not written")
            });
        }
        for (id, event) in events {
            let right = event.status == "sent" && arrived.contains(id);
            self.check(right, Rule::Delivered, || {
                format!(
                    "{id} of {} is {}, arrived: {}",
                    event.scope,
                    event.status,
                    arrived.contains(id)
                )
            });
        }
    }

    fn processes(&mut self) {
        for log in &self.history.logs {
            let bad =
                log.lines().find(|line| line.contains("panicked at") || line.contains("ERROR"));
            if let Some(line) = bad {
                self.wrong(Rule::Panic, line.to_owned());
            }
        }
    }
}

/// Whether a completed row holds this execution's answer.
fn is_answer(row: &Row, run: &Execution) -> bool {
    let Some((status, headers, body)) = &row.answer else { return false };
    let answer =
        Answer { status: *status, headers: headers.clone(), body: run.answer.body.clone() };
    let kept = match body {
        Some(body) => run.whole && !too_large(run) && *body == run.answer.body,
        None => too_large(run),
    };
    kept && class(&run.answer) == Class::Stored
        && answer.header("set-cookie").is_none()
        && answer.status == run.answer.status
        && answer.end_to_end() == run.answer.end_to_end()
}

/// An event's type and data, as text that can be compared.
fn said(event: &Event) -> (String, String) {
    let message: Value = serde_json::from_slice(&event.payload).unwrap_or_default();
    let scope = &event.scope;
    let whole = message["type"] == json!(event.kind)
        && message["tenant"] == json!(scope.tenant)
        && message["operation"] == json!(scope.operation)
        && message["idempotency_key"] == json!(scope.key)
        && message["id"].as_str().map(plain) == Some(event.id.clone());
    let data = if whole { message["data"].to_string() } else { format!("broken: {message}") };
    (event.kind.clone(), data)
}

/// An id without its hyphens.
pub(crate) fn plain(id: &str) -> String {
    id.replace('-', "").to_lowercase()
}

/// What a completed row's templates give for a request's body, sorted.
fn expected(row: &Row, body: &str) -> Vec<(String, String)> {
    let Some((status, _, kept)) = &row.answer else { return Vec::new() };
    let request: Value = serde_json::from_str(body).unwrap_or_default();
    let response: Value =
        kept.as_ref().and_then(|body| serde_json::from_slice(body).ok()).unwrap_or_default();
    let mut events = Vec::new();
    let mut event = |kind: &str, data: Value| events.push((kind.to_owned(), data.to_string()));
    match Operation::of_name(&row.scope.operation) {
        Some(Operation::Orders) => {
            if *status == 201 {
                let data = json!({ "order": response["id"], "ref": request["ref"], "amount": request["amount"] });
                event("order.created", data);
            }
            event("audit.order", json!({ "status": status, "key": row.scope.key }));
            for item in request["items"].as_array().into_iter().flatten() {
                event("order.item", json!({ "sku": item["sku"], "ref": request["ref"] }));
            }
        }
        Some(Operation::Slots) => {
            event("slot.put", json!({ "status": status, "ref": request["ref"] }))
        }
        Some(Operation::Payments | Operation::Reports) if (200..300).contains(status) => {
            event(&row.scope.operation, json!({ "status": status, "response": response }));
        }
        Some(Operation::Payments | Operation::Reports) | None => {}
    }
    events.sort();
    events
}

#[cfg(test)]
mod tests;
