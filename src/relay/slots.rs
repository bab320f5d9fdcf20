//! How many deliveries this process may send to a sink at once, and when failures are an outage.
//!
//! A sink that is well has all slots. After a pause it has one, and twice as many after each round of good answers, so that
//! the backlog does not overload it. Invariants: never more than `full` slots are taken, and a waiter is woken when a slot is
//! given back or added.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

/// The recent results of a sink in this process. Pure.
#[derive(Clone, Debug)]
struct SlowStart {
    /// Slots of a sink that is well.
    full: usize,
    /// Slots now.
    open: usize,
    /// Good answers since `open` last grew.
    answers: usize,
    /// Failures in a row ...
    failures: u32,
    /// ... and how many failures in a row are an outage.
    failures_max: u32,
    /// Failed probes of an outage that may not be over. A sink that fails again at once is then probed no faster. Each good
    /// answer subtracts one: if the events are bad and not the sink, there are good answers between the failures.
    level: u32,
}

impl SlowStart {
    fn succeeded(&mut self) {
        self.failures = 0;
        self.answers += 1;
        if self.answers >= self.open {
            self.answers = 0;
            self.open = self.open.saturating_mul(2).min(self.full);
        }
        self.level = if self.open == self.full { 0 } else { self.level.saturating_sub(1) };
    }

    fn failed(&mut self) -> bool {
        self.failures = self.failures.saturating_add(1);
        self.failures >= self.failures_max
    }

    fn resumed(&mut self, level: u32) {
        (self.open, self.answers, self.failures, self.level) = (1, 0, 0, level);
    }
}

/// The slots of one sink.
#[derive(Debug)]
pub(super) struct Slots {
    state: Mutex<(SlowStart, usize)>,
    /// When a delivery last went well.
    succeeded_at: Mutex<Option<Instant>>,
    freed: Notify,
}

/// A slot that is taken. Given back when it is dropped.
#[derive(Debug)]
pub(super) struct Slot(Arc<Slots>);

impl Drop for Slot {
    fn drop(&mut self) {
        let (_, taken) = &mut *self.0.state.lock();
        *taken = taken.saturating_sub(1);
        self.0.freed.notify_one();
    }
}

impl Slots {
    /// With `full` slots; `failures_max` failures in a row are an outage.
    pub(super) fn new(full: usize, failures_max: u32) -> Self {
        let slow_start =
            SlowStart { full, open: full, answers: 0, failures: 0, failures_max, level: 0 };
        Self {
            state: Mutex::new((slow_start, 0)),
            succeeded_at: Mutex::default(),
            freed: Notify::new(),
        }
    }

    /// How many slots are free.
    pub(super) fn free(&self) -> usize {
        let (slow_start, taken) = &*self.state.lock();
        slow_start.open.saturating_sub(*taken)
    }

    /// Whether the sink is open again and does not have all slots yet.
    pub(super) fn is_starting(&self) -> bool {
        let slow_start = &self.state.lock().0;
        slow_start.open < slow_start.full
    }

    /// How many slots there are now, free or taken.
    pub(super) fn open(&self) -> usize {
        self.state.lock().0.open
    }

    /// Takes a free slot.
    pub(super) fn take(self: &Arc<Self>) -> Option<Slot> {
        let (slow_start, taken) = &mut *self.state.lock();
        if *taken >= slow_start.open {
            return None;
        }
        *taken += 1;
        Some(Slot(Arc::clone(self)))
    }

    /// Waits until a slot may have become free. For one waiter.
    pub(super) async fn freed(&self) {
        self.freed.notified().await;
    }

    /// A delivery went well.
    pub(super) fn succeeded(&self) {
        self.note_success();
        self.state.lock().0.succeeded();
        self.freed.notify_one();
    }

    fn note_success(&self) {
        let mut succeeded_at = self.succeeded_at.lock();
        *succeeded_at = Some(Instant::now());
    }

    /// Whether a delivery succeeded within this time.
    pub(super) fn succeeded_within(&self, within: Duration) -> bool {
        let succeeded_at = *self.succeeded_at.lock();
        succeeded_at.is_some_and(|at| at.elapsed() < within)
    }

    /// A delivery failed. Returns whether it is an outage.
    pub(super) fn failed(&self) -> bool {
        self.state.lock().0.failed()
    }

    /// How many deliveries have failed in a row.
    pub(super) fn failures(&self) -> u32 {
        self.state.lock().0.failures
    }

    /// The failed probes with which the next pause begins.
    pub(super) fn level(&self) -> u32 {
        self.state.lock().0.level
    }

    /// The sink is open again after this many failed probes. It begins with one slot.
    pub(super) fn resumed(&self, level: u32) {
        self.note_success();
        self.state.lock().0.resumed(level);
        self.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_pause_slots_double_with_each_round_of_answers_up_to_all() {
        let slots = Arc::new(Slots::new(16, 10));
        assert_eq!(slots.free(), 16);
        slots.resumed(3);
        let mut seen = Vec::new();
        for _ in 0..31 {
            seen.push(slots.free());
            slots.succeeded();
        }
        let grown = [1, 2, 2, 4, 4, 4, 4, 8];
        assert_eq!(seen[..8], grown);
        assert_eq!(seen.iter().filter(|open| **open == 8).count(), 8);
        assert_eq!((seen[15], slots.free(), slots.level()), (16, 16, 0));
    }

    #[test]
    fn each_good_answer_makes_the_next_outage_one_level_less_and_all_slots_make_it_the_first() {
        let slots = Slots::new(4, 3);
        slots.resumed(9);
        assert!(slots.is_starting());
        assert_eq!(slots.level(), 9, "that of a sink that falls over at once");
        for level in [8, 7] {
            slots.succeeded();
            slots.failed();
            assert_eq!(
                (slots.level(), slots.is_starting()),
                (level, true),
                "failures change nothing"
            );
        }
        slots.succeeded();
        assert_eq!((slots.level(), slots.is_starting()), (0, false));
        // A short outage is forgotten before all slots are open.
        slots.resumed(1);
        slots.succeeded();
        slots.succeeded();
        assert_eq!((slots.level(), slots.is_starting()), (0, true));
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_known_for_how_long_nothing_has_gone_well() {
        let slots = Slots::new(4, 3);
        let second = Duration::from_secs(1);
        assert!(!slots.succeeded_within(second), "nothing has, yet");
        slots.succeeded();
        slots.failed();
        assert!(slots.succeeded_within(second));
        tokio::time::advance(second).await;
        assert!(!slots.succeeded_within(second) && slots.succeeded_within(2 * second));
        slots.resumed(1);
        assert!(slots.succeeded_within(second), "its probe did");
    }

    #[test]
    fn only_failures_in_a_row_make_an_outage() {
        let slots = Slots::new(4, 3);
        for _ in 0..20 {
            assert!(!slots.failed() && !slots.failed());
            slots.succeeded();
        }
        assert!(!slots.failed() && !slots.failed() && slots.failed());
        assert!(slots.failed(), "and go on being one until the pause is made");
    }

    #[test]
    fn a_slot_is_given_back_when_it_is_dropped_and_none_is_given_twice() {
        let slots = Arc::new(Slots::new(2, 1));
        let (one, two) = (slots.take(), slots.take());
        assert!(one.is_some() && two.is_some() && slots.take().is_none());
        drop(one);
        assert_eq!(slots.free(), 1);
        // Slots that are still taken count against the one slot of a resumed sink.
        slots.resumed(0);
        assert!(slots.take().is_none());
        drop(two);
        assert!(slots.take().is_some());
    }
}
