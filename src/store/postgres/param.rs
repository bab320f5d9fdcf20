//! The parameters of a statement, each with the type of the server that its own type stands for: nothing is asked of the server
//! before the statement is sent.

use std::error::Error;
use std::time::SystemTime;

use bytes::BytesMut;
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};
use uuid::Uuid;

use crate::record::{Attempt, Fence, Key, Operation, OwnerId, RecordId, Scope, Tenant};

/// The parameters of a statement, in their order.
pub(super) type Params<'a> = &'a [Param<'a>];

/// One parameter.
pub(super) type Param<'a> = &'a dyn Typed;

/// A parameter with its type.
pub(super) trait Typed: Sync {
    /// As the driver takes it.
    fn typed(&self) -> (&(dyn ToSql + Sync), Type);
}

impl<T: ToSql + Sync + Typable> Typed for T {
    fn typed(&self) -> (&(dyn ToSql + Sync), Type) {
        (self, T::ONE)
    }
}

/// Which types of the server stand for a type: for one value of it, for an array of them, and for an array of such lists.
pub(super) trait Typable {
    const ONE: Type;
    const ARRAY: Type;
    /// Bytes only: the server has no other arrays of lists.
    const LISTS: Type = Type::UNKNOWN;
}

macro_rules! typable {
    ($($of:ty: $one:ident, $array:ident;)*) => {
        $(impl Typable for $of {
            const ONE: Type = Type::$one;
            const ARRAY: Type = Type::$array;
        })*
    };
}

typable! {
    bool: BOOL, BOOL_ARRAY;
    i16: INT2, INT2_ARRAY;
    i32: INT4, INT4_ARRAY;
    i64: INT8, INT8_ARRAY;
    f64: FLOAT8, FLOAT8_ARRAY;
    str: TEXT, TEXT_ARRAY;
    String: TEXT, TEXT_ARRAY;
    Uuid: UUID, UUID_ARRAY;
    SystemTime: TIMESTAMPTZ, TIMESTAMPTZ_ARRAY;
}

impl Typable for u8 {
    const ONE: Type = Type::CHAR;
    const ARRAY: Type = Type::BYTEA;
    const LISTS: Type = Type::BYTEA_ARRAY;
}

impl<T: Typable> Typable for [T] {
    const ONE: Type = T::ARRAY;
    const ARRAY: Type = T::LISTS;
}

impl<T: Typable> Typable for Vec<T> {
    const ONE: Type = <[T]>::ONE;
    const ARRAY: Type = <[T]>::ARRAY;
}

impl<T: Typable> Typable for Option<T> {
    const ONE: Type = T::ONE;
    const ARRAY: Type = T::ARRAY;
    const LISTS: Type = T::LISTS;
}

impl<T: Typable + ?Sized> Typable for &T {
    const ONE: Type = T::ONE;
    const ARRAY: Type = T::ARRAY;
    const LISTS: Type = T::LISTS;
}

/// Types of ours that are stored as another one.
macro_rules! stored {
    ($($of:ty as $kind:ty: $value:expr;)*) => {
        $(impl ToSql for $of {
            fn to_sql(
                &self,
                kind: &Type,
                out: &mut BytesMut,
            ) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
                let value: fn(&$of) -> $kind = $value;
                value(self).to_sql(kind, out)
            }

            fn accepts(kind: &Type) -> bool {
                <$kind>::accepts(kind)
            }

            to_sql_checked!();
        }

        impl Typable for $of {
            const ONE: Type = <$kind>::ONE;
            const ARRAY: Type = <$kind>::ARRAY;
        })*
    };
}

stored! {
    RecordId as Uuid: |id| (*id).into();
    OwnerId as Uuid: |owner| (*owner).into();
    // Nobody gets beyond two thousand million.
    Attempt as i32: |attempt| i32::try_from(attempt.number()).unwrap_or(i32::MAX);
    Tenant as &str: Tenant::as_str;
    Operation as &str: Operation::as_str;
    Key as &str: Key::as_str;
}

/// Scope and fence, as parameters 1 to 5 of all changes of one record.
pub(super) fn fenced<'a>(scope: &'a Scope, fence: &'a Fence) -> Vec<Param<'a>> {
    vec![&scope.tenant, &scope.operation, &scope.key, &fence.id, &fence.attempt]
}
