//! The promises of the pools, as seen by those who use them.

mod order;
mod stepped;
mod threaded;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use crate::{Class, Context, Next, Task};

/// A task made of a closure.
struct Does<F> {
    name: &'static str,
    class: Class,
    work: F,
}

impl<F: Fn(&Context<'_>) -> Next + Send + Sync + 'static> Task for Does<F> {
    fn name(&self) -> &'static str {
        self.name
    }
    fn class(&self) -> Class {
        self.class
    }
    fn run(&self, cx: &Context<'_>) -> Next {
        (self.work)(cx)
    }
}

fn does(name: &'static str, work: impl Fn(&Context<'_>) -> Next + Send + Sync + 'static) -> Arc<dyn Task> {
    Arc::new(Does { name, class: Class::Normal, work })
}

fn does_as(
    class: Class,
    name: &'static str,
    work: impl Fn(&Context<'_>) -> Next + Send + Sync + 'static,
) -> Arc<dyn Task> {
    Arc::new(Does { name, class, work })
}

/// A task that counts its runs and returns `next` after each.
fn counts(runs: &Arc<AtomicUsize>, next: Next) -> Arc<dyn Task> {
    let runs = runs.clone();
    does("counts", move |_| {
        runs.fetch_add(1, SeqCst);
        next
    })
}

fn count(runs: &AtomicUsize) -> usize {
    runs.load(SeqCst)
}
