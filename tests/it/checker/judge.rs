//! The judge: what a history must not contain. Pure, so that made-up histories check it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::api::found_body;
use super::history::{Act, Answer, Asked, Event, Execution, History, Life, Op, Row, Scope, Told};
use super::plan::{LEASE_MS, Operation, REPORT_MAX};

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
    /// Where the API is asked, nothing is executed again before it has said that it is not there.
    Asked,
    /// What goes past the store is allowed to, says so, and is nobody else's.
    Bypassed,
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
    judge.unprotected();
    judge.asked();
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
    /// Of what has a record.
    by_scope: BTreeMap<&'h Scope, Vec<&'h Execution>>,
    by_op: BTreeMap<u64, Vec<&'h Execution>>,
    by_attempt: BTreeMap<(&'h str, u64), Vec<&'h Execution>>,
    /// By record, those that are gone too.
    rows: BTreeMap<&'h str, &'h Row>,
    by_id: BTreeMap<u64, &'h Op>,
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

fn is_of(scope: &Scope, kind: fn(Operation) -> bool) -> bool {
    Operation::of_name(&scope.operation).is_some_and(kind)
}

/// For how long before an execution another question may come than the one that let it go, in microseconds.
const HELD_UP: u64 = 200_000;

/// How far the database's clock and the run's may be apart, in microseconds.
const SKEW: i64 = 100_000;

/// Between an end of a record's retention and the last replay of what a process has in memory, in microseconds.
const OUTLIVES: i64 = 500_000;

/// Whose words an answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    Execution(u64),
    Operator(u64),
    /// An execution, as a question has found it.
    Found(u64),
}

fn source(answer: &Answer) -> Option<Source> {
    let number = |name| answer.header(name)?.parse().ok();
    let found = || serde_json::from_slice::<Value>(&answer.body).ok()?["execution"].as_u64();
    number("x-execution")
        .map(Source::Execution)
        .or_else(|| number("x-operator").map(Source::Operator))
        .or_else(|| found().map(Source::Found))
}

impl<'h> Judge<'h> {
    fn new(history: &'h History) -> Self {
        let mut judge = Self {
            history,
            by_number: BTreeMap::new(),
            by_scope: BTreeMap::new(),
            by_op: BTreeMap::new(),
            by_attempt: BTreeMap::new(),
            rows: BTreeMap::new(),
            by_id: history.ops.iter().map(|op| (op.id, op)).collect(),
            ops: BTreeMap::new(),
            released: BTreeSet::new(),
            completed: BTreeSet::new(),
            found: Vec::new(),
        };
        for row in history.past.iter().chain(&history.rows) {
            judge.rows.insert(&row.record, row);
        }
        for run in &history.executions {
            judge.by_number.insert(run.number, run);
            judge.by_op.entry(run.op).or_default().push(run);
            if run.record.is_empty() {
                continue;
            }
            judge.by_scope.entry(&run.scope).or_default().push(run);
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
        if first.record == second.record {
            // Where the API is asked, see also `asked`: it has said of the first that it is not there.
            let again = is_of(&first.scope, Operation::retries)
                || (is_of(&first.scope, Operation::asks) && (!first.made || self.slept(second)));
            return again && first.attempt != second.attempt;
        }
        if is_of(&first.scope, Operation::expires) && self.expired_before(first, second) {
            return true;
        }
        // The second may be late: sent before its record was released, and delayed on its way.
        let by_hand = |run: &Execution| self.released.contains(run.record.as_str());
        freed(first) || by_hand(first) || by_hand(second)
    }

    /// Whether an attempt was sent by a process that slept past its lease before it came.
    fn slept(&self, run: &Execution) -> bool {
        let Some(op) = self.by_id.get(&run.op) else { return false };
        self.history.sleeps.iter().any(|sleep| {
            sleep.gateway == op.gateway
                && sleep.until - sleep.since >= LEASE_MS * 1000
                && (op.invoked..run.at).contains(&sleep.until)
        })
    }

    /// Whether the first one's record had expired when the second one's was made, by the database's clock.
    fn expired_before(&self, first: &Execution, second: &Execution) -> bool {
        let life = |run: &Execution| self.history.lives.get(&run.record);
        let expires = life(first).and_then(|life| life.expires);
        life(second).zip(expires).is_some_and(|(second, expires)| expires <= second.made)
    }

    /// What was forwarded past the store.
    fn unprotected(&mut self) {
        for run in self.history.executions.iter().filter(|run| run.record.is_empty()) {
            let told = self.by_id.get(&run.op).map(|op| &op.told);
            let says_so = match told {
                Some(Told::Answer(answer)) => answer.bypassed(),
                Some(Told::Nothing(_)) => true,
                None => false,
            };
            self.check(self.history.bypass && says_so, Rule::Bypassed, || {
                format!("execution {} came past the store, and {told:?} was told", run.number)
            });
        }
    }

    /// Each later attempt where the API is asked comes right after whoever sends it has asked, and those before it were not
    /// there. Another question of his that was held up on its way may come between the two.
    fn asked(&mut self) {
        let mut wrong = Vec::new();
        for (scope, runs) in &self.by_scope {
            let later = runs.iter().filter(|run| run.attempt > 1);
            for run in later.filter(|_| is_of(scope, Operation::asks)) {
                let before = runs.iter().filter(|other| {
                    other.record == run.record && other.at < run.at && other.number != run.number
                });
                let last = before.map(|other| other.at).max().unwrap_or(0);
                let gateway = self.by_id.get(&run.op).map(|op| op.gateway);
                let asked = self.history.questions.iter().filter(|question| {
                    question.scope == **scope
                        && Some(question.gateway) == gateway
                        && (last..run.at).contains(&question.at)
                });
                let asked: Vec<_> = asked.collect();
                let by_then = run.at.saturating_sub(HELD_UP);
                let asked = asked.iter().enumerate().any(|(n, question)| {
                    question.told == Asked::NotFound
                        && (n + 1 == asked.len() || question.at > by_then)
                });
                if !asked && !self.slept(run) {
                    wrong.push(format!(
                        "execution {} of {scope} came before the API had said that there is none",
                        run.number
                    ));
                }
            }
        }
        for about in wrong {
            self.wrong(Rule::Asked, about);
        }
    }

    /// One request and what it was told.
    fn told(&mut self, op: &'h Op) {
        let Told::Answer(answer) = &op.told else { return };
        let id = op.id;
        if answer.bypassed() {
            return self.bypassed(op, answer);
        }
        if let Some(problem) = answer.problem() {
            return self.problem(op, answer, &problem);
        }
        let run = match source(answer) {
            Some(Source::Operator(_)) => return self.by_hand(op, answer),
            Some(Source::Found(number)) => return self.found_out(op, answer, number),
            Some(Source::Execution(number)) => self.by_number.get(&number).copied(),
            None => None,
        };
        let Some(run) = run else { return self.of_nobody(op, answer) };
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

    fn of_nobody(&mut self, op: &Op, answer: &Answer) {
        let (id, brief) = (op.id, answer.brief());
        self.wrong(Rule::Foreign, format!("op {id} got an answer of nobody: {brief}"));
    }

    /// An answer that a question has found.
    fn found_out(&mut self, op: &'h Op, answer: &Answer, number: u64) {
        let run = self.by_number.get(&number).copied();
        let Some(run) = run.filter(|_| is_of(&op.scope, Operation::asks)) else {
            return self.of_nobody(op, answer);
        };
        let id = op.id;
        self.check(run.scope == op.scope, Rule::Foreign, || {
            format!("op {id} of {} got what was found of {}", op.scope, run.scope)
        });
        let record = answer.record().unwrap_or_default();
        let own = run.record == record;
        self.check(!own || run.body == op.body, Rule::Mismatch, || {
            format!("op {id} got what was found of execution {number}, which is another request")
        });
        let said = self.history.questions.iter().any(|question| {
            question.scope == run.scope
                && question.told == Asked::Found(number)
                && question.at < op.ended
        });
        let same = self.row_of(&op.scope, record).is_some()
            && self.may_find(record, run)
            && answer.status == 201
            && answer.end_to_end() == [("content-type", "application/json")]
            && answer.body == found_body(number).as_bytes();
        self.check(said && same && answer.kept() && answer.replayed(), Rule::SameAnswer, || {
            format!("op {id} got {}, which no question has found", answer.brief())
        });
    }

    /// Whether the API may find this execution when it is asked about a record: its own, or one whose record an operator
    /// released although it was made. Then the key is all that tells them apart, and it is the same.
    fn may_find(&self, record: &str, run: &Execution) -> bool {
        run.record == record || self.released.contains(run.record.as_str())
    }

    /// An answer that says that nothing protected its request: it is the request's own, and nothing is said of later ones.
    fn bypassed(&mut self, op: &'h Op, answer: &Answer) {
        let id = op.id;
        let runs = self.by_op.get(&id).cloned().unwrap_or_default();
        let alone = answer.record().is_none() && !answer.kept() && !answer.replayed();
        let right = match (answer.problem().as_deref(), runs.as_slice()) {
            (Some("upstream-unreachable"), []) => true,
            (Some(problem), _) => DOUBT.contains(&problem),
            (None, [run]) => {
                run.whole
                    && run.record.is_empty()
                    && answer.status == run.answer.status
                    && answer.end_to_end() == run.answer.end_to_end()
                    && answer.body == run.answer.body
            }
            (None, _) => false,
        };
        self.check(self.history.bypass && alone && right, Rule::Bypassed, || {
            format!("op {id} got {} past the store, and executions {runs:?}", answer.brief())
        });
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
        let row = self.row_of(&run.scope, record);
        let stands = row.is_some_and(|row| row.status == "completed" || row.attempt > run.attempt);
        self.check(acted || stands, Rule::Remembered, || {
            format!("op {} was answered from a spill, and the record is {row:?}", op.id)
        });
    }

    /// The row of a record of this scope.
    fn row_of(&self, scope: &Scope, record: &str) -> Option<&'h Row> {
        self.rows.get(record).copied().filter(|row| row.scope == *scope)
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
        let row = self.row_of(&op.scope, record).is_some();
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

    /// What was kept stays, for everybody, until it expires.
    fn kept(&mut self) {
        let scopes: Vec<_> = self.ops.iter().map(|(scope, ops)| (*scope, ops.clone())).collect();
        for (scope, ops) in scopes {
            let mut records: BTreeMap<Option<&str>, Vec<(&'h Op, &'h Answer)>> = BTreeMap::new();
            for op in &ops {
                if let Told::Answer(answer) = &op.told
                    && answer.kept()
                {
                    records.entry(answer.record()).or_default().push((op, answer));
                }
            }
            let one = records.len() <= 1 || is_of(scope, Operation::expires);
            self.check(one, Rule::SameAnswer, || {
                format!("{scope} has answers of several records: {:?}", records.keys())
            });
            for (record, kept) in records {
                self.kept_of_record(scope, record.unwrap_or_default(), &kept, &ops);
            }
        }
    }

    /// The kept answers of one record, and all requests under its scope.
    fn kept_of_record(
        &mut self,
        scope: &Scope,
        record: &str,
        kept: &[(&'h Op, &'h Answer)],
        ops: &[&'h Op],
    ) {
        let told = kept.iter().filter(|(_, answer)| answer.problem().is_none());
        let sources: BTreeSet<_> = told.map(|(_, answer)| source(answer)).collect();
        self.check(sources.len() <= 1, Rule::SameAnswer, || {
            format!("{scope} has several answers: {sources:?}")
        });
        let Some((first, _)) = kept.iter().min_by_key(|(op, _)| op.ended) else { return };
        let row = self.row_of(scope, record);
        let stands = row.is_some_and(|row| row.status == "completed");
        self.check(stands, Rule::Remembered, || {
            format!("op {} of {scope} was told that its answer is kept: {row:?}", first.id)
        });
        let expires = self.history.lives.get(record).and_then(|life| life.expires);
        let expires = expires.filter(|_| is_of(scope, Operation::expires)).unwrap_or(i64::MAX);
        for op in ops.iter().filter(|op| op.invoked > first.ended) {
            if op.ended as i64 + SKEW < expires {
                self.after(first, record, op);
            } else if op.invoked as i64 > expires.saturating_add(OUTLIVES) {
                self.after_its_end(record, op);
            }
        }
    }

    /// A request that began when the answer had been kept: the answer, or a refusal for now.
    fn after(&mut self, first: &Op, record: &str, op: &Op) {
        let Told::Answer(answer) = &op.told else { return };
        if answer.bypassed() {
            return;
        }
        let same = (&first.target, &first.body) == (&op.target, &op.body);
        let right = match answer.problem().as_deref() {
            // A leader of its replica may have been at it since before.
            Some("store-unavailable" | "overloaded" | "in-progress") => true,
            Some("response-not-retained") => same,
            Some("request-mismatch") => !same,
            Some(_) => false,
            None => same && answer.kept() && answer.record() == Some(record),
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

    /// A request that began when the record had expired for long: nothing of it is left.
    fn after_its_end(&mut self, record: &str, op: &Op) {
        let Told::Answer(answer) = &op.told else { return };
        self.check(answer.record() != Some(record), Rule::SameAnswer, || {
            format!("op {} came after {record} had expired, and got {}", op.id, answer.brief())
        });
    }

    /// What the API was asked has left a record, unless it is known not to have executed.
    fn remembered(&mut self) {
        for run in &self.history.executions {
            let record = run.record.as_str();
            if record.is_empty() || freed(run) || self.released.contains(record) {
                continue;
            }
            let stands = self.row_of(&run.scope, record).is_some();
            self.check(stands, Rule::Remembered, || {
                format!("execution {} of {} has no record {record}", run.number, run.scope)
            });
        }
    }

    /// The tables' rows: each in a state that lasts, each answer somebody's.
    fn rows(&mut self) {
        for row in &self.history.past {
            let Row { scope, record, .. } = row;
            let life = self.history.lives.get(record);
            let over = |Life { expires, gone, .. }: &Life| *expires <= *gone;
            let right = is_of(scope, Operation::expires) && life.is_some_and(over);
            self.check(right, Rule::Remembered, || format!("{scope}, {record}, is gone: {life:?}"));
        }
        for row in self.history.rows.iter().chain(&self.history.past) {
            let Row { scope, record, status, .. } = row;
            if status != "completed" {
                self.check(status == "unknown", Rule::Quiet, || format!("{scope} is {status}"));
                continue;
            }
            let by_hand = self.completed.contains(record.as_str());
            let right = by_hand
                || self.kept_of(row).is_some_and(|run| is_answer(row, run))
                || self.is_found(row);
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

    /// Whether a row holds what a question has found.
    fn is_found(&self, row: &Row) -> bool {
        let Some((201, headers, Some(body))) = &row.answer else { return false };
        let one = [("content-type".to_owned(), "application/json".to_owned())];
        let found = self.history.questions.iter().filter(|question| question.scope == row.scope);
        let mut runs = found.filter_map(|question| match question.told {
            Asked::Found(number) => self.by_number.get(&number),
            Asked::NotFound | Asked::Nothing => None,
        });
        is_of(&row.scope, Operation::asks)
            && *headers == one
            && runs.any(|run| {
                self.may_find(&row.record, run) && *body == found_body(run.number).as_bytes()
            })
    }

    /// Completed records and events: neither without the other.
    fn events(&mut self) {
        let mut written: BTreeMap<&str, Vec<&Event>> = BTreeMap::new();
        for event in &self.history.events {
            written.entry(&event.record).or_default().push(event);
        }
        let rows = self.history.rows.iter().chain(&self.history.past);
        for row in rows.filter(|row| row.status == "completed") {
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
        Some(Operation::Refunds) if *status == 201 => {
            event("refund.made", json!({ "refund": response["id"], "ref": request["ref"] }));
        }
        Some(Operation::Payments | Operation::Reports | Operation::Passes)
            if (200..300).contains(status) =>
        {
            event(&row.scope.operation, json!({ "status": status, "response": response }));
        }
        Some(Operation::Payments | Operation::Reports | Operation::Passes | Operation::Refunds)
        | None => {}
    }
    events.sort();
    events
}

#[cfg(test)]
mod tests;
