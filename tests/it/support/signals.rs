//! What `kill` and `prlimit` do, without the programs: a minimal system has none.

use std::process::Child;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};

/// Sends a signal by its name, `TERM` say; whether the process was there to take it.
pub fn send(pid: u32, name: &str) -> bool {
    let signal = match name {
        "TERM" => Signal::TERM,
        "INT" => Signal::INT,
        "QUIT" => Signal::QUIT,
        "KILL" => Signal::KILL,
        "STOP" => Signal::STOP,
        "CONT" => Signal::CONT,
        "HUP" => Signal::HUP,
        "USR1" => Signal::USR1,
        "USR2" => Signal::USR2,
        "PIPE" => Signal::PIPE,
        _ => panic!("{name}: add it to the signals that are sent"),
    };
    process(pid).is_some_and(|pid| kill_process(pid, signal).is_ok())
}

/// Sets the limit that holds for a process now, none: unlimited; the most that it may be set to stays.
pub fn limit(pid: u32, resource: Resource, most: Option<u64>) {
    let highest = getrlimit(resource).maximum;
    let new = Rlimit { current: most, maximum: highest };
    prlimit(process(pid), resource, new).expect("the process takes limits");
}

fn process(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

/// Kills a child and waits for its end. For a drop: nothing of it fails a test, or a second time.
pub fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// What a lock guards, also where a test failed while it had it: a drop must not fail, too.
pub fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::super::broker::Redis;
    use super::super::postgres::Cluster;
    use super::*;

    /// One failing test is one failing test: what it had started ends, and the run goes on.
    #[test]
    fn a_test_that_fails_with_its_server_in_its_hands_ends_it_and_fails_alone() {
        let (cluster, broker) = (Cluster::own(), Redis::new(&[]));
        broker.server.start();
        let (database, queue) = (cluster.pid(), broker.server.pid());
        let failed = catch_unwind(AssertUnwindSafe(move || {
            let (_cluster, _broker) = (&cluster, &broker);
            cluster.fail_inside();
        }));
        assert!(failed.is_err());
        assert!(!send(database, "CONT") && !send(queue, "CONT"), "no server is left");
    }
}
