//! With the feature: reads what was asked for, and does it.
//!
//! The plan is read once, before anything runs; afterwards only its counters change. A process whose plan was never
//! read (a test that runs parts of the program in itself) passes every point.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::Point;
use crate::telemetry::log;

const VARIABLE: &str = "ONCEGATE_FAULT";

/// How often a paused point looks whether it may go on.
const LOOK: Duration = Duration::from_millis(2);

static PLAN: OnceLock<Vec<Fault>> = OnceLock::new();

/// A fault that was asked for by a test.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("a fault at {0:?}, as {VARIABLE} asks for")]
pub struct Injected(Point);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Act {
    Kill,
    Fail,
    Panic,
    Pause(PathBuf),
}

/// One fault: what happens at which passage of a point.
#[derive(Debug)]
struct Fault {
    point: Point,
    passage: u32,
    passed: AtomicU32,
    act: Act,
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| format!("{VARIABLE}: {text:?}: {why}");
        let (place, act) = text.split_once('=').ok_or_else(|| wrong("write POINT=ACT"))?;
        let (name, passage) = place.split_once('@').unwrap_or((place, "1"));
        let found = Point::all().find(|(_, known)| known == name);
        let (point, _) = found.ok_or_else(|| wrong("there is no such point"))?;
        let passage = passage.parse().ok().filter(|passage| *passage > 0);
        let passage = passage.ok_or_else(|| wrong("after @ stands a passage, counted from 1"))?;
        let act = match act.split_once(':') {
            None if act == "kill" => Act::Kill,
            None if act == "panic" => Act::Panic,
            None if act == "error" && point.can_fail() => Act::Fail,
            None if act == "error" => return Err(wrong("nobody takes an error there")),
            Some(("pause", file)) if !file.is_empty() => Act::Pause(file.into()),
            Some(_) | None => return Err(wrong("the act is kill, error, panic or pause:FILE")),
        };
        Ok(Self { point, passage, passed: AtomicU32::new(0), act })
    }
}

/// Reads the plan, before anything runs.
///
/// # Errors
/// What is wrong with the variable: a fault that is never met would make its test hold for nothing.
pub fn arm() -> Result<(), String> {
    let Ok(text) = std::env::var(VARIABLE) else { return Ok(()) };
    let plan = text.split(',').map(Fault::from_str).collect::<Result<_, _>>()?;
    PLAN.set(plan).map_err(|_| format!("{VARIABLE} was read twice"))
}

/// Whether a variable is the plan's.
#[must_use]
pub fn is_variable(name: &str) -> bool {
    name == VARIABLE
}

/// What is asked for at this passage.
fn due(point: Point) -> Option<&'static Act> {
    let plan = PLAN.get()?;
    // Every fault of the point counts the passage.
    let count = |fault: &Fault| fault.passed.fetch_add(1, Ordering::SeqCst) + 1;
    let here = plan.iter().filter(|fault| fault.point == point);
    here.fold(None, |due, fault| if count(fault) == fault.passage { Some(&fault.act) } else { due })
}

/// Passes a point: dies, panics or waits there, if that is asked for.
pub async fn point(point: Point) {
    // An error is not asked for where nobody takes it: see `can_fail`.
    if let Err(fault) = fallible(point).await {
        tracing::error!(%fault, "nobody takes it");
    }
}

/// Passes a point outside the runtime, or where nothing can be awaited. A pause blocks the thread.
pub fn point_blocking(point: Point) {
    match due(point) {
        None | Some(Act::Fail) => {}
        Some(Act::Kill) => die(point),
        Some(Act::Panic) => fall(point),
        Some(Act::Pause(file)) => {
            arrive(point, file);
            while !file.exists() {
                std::thread::sleep(LOOK);
            }
        }
    }
}

/// Passes a point; also fails there, if that is asked for.
///
/// # Errors
/// The fault that is asked for.
pub async fn fallible(point: Point) -> Result<(), Injected> {
    match due(point) {
        None => {}
        Some(Act::Fail) => {
            tracing::warn!(?point, "fault point: fails");
            return Err(Injected(point));
        }
        Some(Act::Kill) => die(point),
        Some(Act::Panic) => fall(point),
        Some(Act::Pause(file)) => {
            arrive(point, file);
            while !file.exists() {
                tokio::time::sleep(LOOK).await;
            }
        }
    }
    Ok(())
}

/// Ends the process as the kernel would: nothing is flushed, no destructor runs, no other thread takes another step.
fn die(point: Point) -> ! {
    tracing::warn!(?point, "fault point: kills this process");
    // The test reads it.
    log::flush();
    let (this, kill) = (rustix::process::getpid(), rustix::process::Signal::KILL);
    if let Err(error) = rustix::process::kill_process(this, kill) {
        tracing::error!(%error, "fault point: cannot kill this process, which aborts instead");
    }
    std::process::abort()
}

#[expect(clippy::panic, reason = "a test asks for it, to see what a lost task leaves behind")]
fn fall(point: Point) -> ! {
    panic!("fault point {point:?}")
}

/// Tells the test that the process stands at the point.
fn arrive(point: Point, file: &Path) {
    let mut reached = file.as_os_str().to_owned();
    reached.push(".reached");
    if let Err(error) = std::fs::write(&reached, b"") {
        tracing::error!(?point, %error, "fault point: cannot say that it is reached");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_names_points_passages_and_acts() {
        let fault: Fault = "after-reserve=kill".parse().unwrap();
        assert_eq!(fault.point, Point::After(super::super::Verb::Reserve));
        assert_eq!((fault.passage, fault.act), (1, Act::Kill));
        let fault: Fault = "settling@3=pause:/tmp/a:b".parse().unwrap();
        assert_eq!(fault.point, Point::Settling);
        assert_eq!((fault.passage, fault.act), (3, Act::Pause("/tmp/a:b".into())));
    }

    #[test]
    fn a_plan_that_would_never_be_met_is_refused() {
        for wrong in [
            "",
            "after-reserve",
            "after-lunch=kill",
            "after-reserve@0=kill",
            "after-reserve@x=kill",
            "after-reserve=sleep",
            "after-reserve=pause",
            "after-reserve=pause:",
            "connected=error",
        ] {
            let refused = wrong.parse::<Fault>().unwrap_err();
            assert!(refused.contains("ONCEGATE_FAULT"), "{refused}");
        }
    }

    #[test]
    fn every_point_has_a_name_of_its_own_in_kebab_case() {
        let mut names: Vec<_> = Point::all().map(|(_, name)| name).collect();
        let kebab = |c: char| c.is_ascii_lowercase() || c == '-';
        assert!(names.iter().all(|name| name.chars().all(kebab)), "{names:?}");
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
