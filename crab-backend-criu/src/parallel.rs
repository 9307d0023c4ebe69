//! Work on many pieces by a few threads.

use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crab_core::{Error, ErrorKind, Result};

/// More threads would only wait for memory.
const MOST: usize = 4;

/// Does `work` on each of `0..count`, with what `prepare` made for the thread, and returns what came of it in order.
/// The first error ends it.
pub(crate) fn each<S, T: Send>(
    count: usize,
    prepare: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let one = || {
        let (mut state, mut done) = (prepare(), Vec::new());
        while !failed.load(Ordering::Relaxed) {
            let n = next.fetch_add(1, Ordering::Relaxed);
            if n >= count {
                break;
            }
            let outcome = work(&mut state, n).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
            done.push((n, outcome));
        }
        Ok(done)
    };
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(MOST).min(count);
    let mut done: Vec<(usize, T)> = if threads <= 1 {
        one()?
    } else {
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(one)).collect();
            let mut outcomes = vec![one()];
            for other in others {
                let ended = |_| Err(Error::new(ErrorKind::Internal, "a thread of the image store ended"));
                outcomes.push(other.join().unwrap_or_else(ended));
            }
            outcomes.into_iter().collect::<Result<Vec<_>>>()
        })?
        .into_iter()
        .flatten()
        .collect()
    };
    done.sort_unstable_by_key(|(n, _)| *n);
    Ok(done.into_iter().map(|(_, outcome)| outcome).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_done_in_order_and_the_first_error_is_told() {
        let squares = each(1000, || (), |(), n| Ok(n * n)).unwrap();
        assert_eq!(squares, (0..1000).map(|n| n * n).collect::<Vec<_>>());
        let bad = |(): &mut (), n: usize| match n {
            17 => Err(Error::new(ErrorKind::Full, "seventeen")),
            _ => Ok(()),
        };
        assert_eq!(each(1000, || (), bad).unwrap_err().kind(), ErrorKind::Full);
        assert!(each(0, || (), |(), _| Ok(())).unwrap().is_empty());
    }
}
