//! A panic in a task ends the process: what the task had half done is nowhere written down, so recovery starts from what
//! is on disk. This module sees to it that the task's name is told.

#[cfg(not(any(loom, shuttle)))]
use std::sync::Once;

#[cfg(not(any(loom, shuttle)))]
use crate::core::current_task;

/// Tells the task's name before the panic's own message. In builds that abort on panic this is the only place to do it.
pub(crate) fn tell_names() {
    #[cfg(not(any(loom, shuttle)))]
    {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            let others = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                if let Some(name) = current_task() {
                    eprintln!("panic in task {name}");
                }
                others(info);
            }));
        });
    }
}

pub(crate) fn abort(name: &str) -> ! {
    eprintln!("task {name} panicked: aborting, as its work may be half done; on restart the data recovers from disk");
    std::process::abort()
}
