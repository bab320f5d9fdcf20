//! Limits log lines that repeat: the first is written at once, later ones from time to time with the number left out.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long no further line is written after a line.
const PAUSE: Duration = Duration::from_secs(10);

/// The pace of one kind of line.
#[derive(Debug, Default)]
pub struct Pace(Mutex<Option<Told>>);

#[derive(Debug)]
struct Told {
    at: Instant,
    left_out: u64,
}

impl Pace {
    /// If a line is due now, the number of lines left out since the last one.
    #[must_use]
    pub fn due(&self) -> Option<u64> {
        self.due_at(Instant::now())
    }

    fn due_at(&self, now: Instant) -> Option<u64> {
        let mut told = self.0.lock();
        if let Some(told) = told.as_mut()
            && now.saturating_duration_since(told.at) < PAUSE
        {
            told.left_out += 1;
            return None;
        }
        let left_out = told.take().map_or(0, |told| told.left_out);
        *told = Some(Told { at: now, left_out: 0 });
        Some(left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_comes_at_once_and_the_next_after_a_pause_with_what_was_left_out() {
        let (pace, start) = (Pace::default(), Instant::now());
        assert_eq!(pace.due_at(start), Some(0));
        assert_eq!(pace.due_at(start), None);
        assert_eq!(pace.due_at(start + PAUSE / 2), None);
        assert_eq!(pace.due_at(start + PAUSE), Some(2));
        assert_eq!(pace.due_at(start + PAUSE * 3), Some(0));
    }
}
