//! Stores over another store. What such a layer does not do itself goes through to the one beneath.
//!
//! Each verb is declared once, by `verbs!`: from its declaration come the trait that stores implement, and the layer's trait,
//! in which every verb has a body already that passes it on. So a layer writes down the verbs that it changes, and no others.

use super::{Error, Store};

/// What passes verbs on to a store beneath it.
pub trait Layer: Send + Sync + 'static {
    /// The store beneath.
    ///
    /// # Errors
    /// Where there is none: the verb fails with this.
    fn beneath(&self) -> Result<&dyn Store, Error>;

    /// Around each verb that is passed on. `verb` is the method's name.
    fn around<T: Send>(
        &self,
        verb: &'static str,
        passed_on: impl Future<Output = Result<T, Error>> + Send,
    ) -> impl Future<Output = Result<T, Error>> + Send {
        let _ = verb;
        passed_on
    }
}

/// Declares a trait of the store and the trait of its layers; whatever implements the latter has the former.
macro_rules! verbs {
    (
        $(#[$doc:meta])*
        pub trait $name:ident, layered by $layer:ident {
            $(
                $(#[$verb_doc:meta])*
                async fn $verb:ident(&self $(, $arg:ident: $kind:ty)* $(,)?) -> Result<$done:ty, Error>;
            )*
        }
    ) => {
        $(#[$doc])*
        #[async_trait::async_trait]
        pub trait $name: Send + Sync + 'static {
            $(
                $(#[$verb_doc])*
                async fn $verb(&self $(, $arg: $kind)*) -> Result<$done, $crate::store::Error>;
            )*
        }

        #[doc = concat!("A layer over [`", stringify!($name), "`]: what it does not do itself is passed on.")]
        pub trait $layer: $crate::store::layer::Layer {
            $(
                #[doc = concat!("See [`", stringify!($name), "::", stringify!($verb), "`].")]
                fn $verb(&self $(, $arg: $kind)*)
                -> impl Future<Output = Result<$done, $crate::store::Error>> + Send {
                    self.around(stringify!($verb), async move {
                        self.beneath()?.$verb($($arg),*).await
                    })
                }
            )*
        }

        #[async_trait::async_trait]
        impl<L: $layer> $name for L {
            $(
                async fn $verb(&self $(, $arg: $kind)*) -> Result<$done, $crate::store::Error> {
                    $layer::$verb(self $(, $arg)*).await
                }
            )*
        }
    };
}
pub(super) use verbs;

/// Implements a trait of the store: a line for each verb, with the future that does it.
macro_rules! implement {
    ($name:ident for $store:ty, $this:ident: {
        $($verb:ident($($arg:ident: $kind:ty),*) -> $done:ty = $does:expr;)*
    }) => {
        #[async_trait::async_trait]
        impl $name for $store {
            $(async fn $verb(&$this $(, $arg: $kind)*) -> Result<$done, $crate::store::Error> {
                $does.await
            })*
        }
    };
}
pub(super) use implement;
